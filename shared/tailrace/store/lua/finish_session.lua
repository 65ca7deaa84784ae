-- Closes a session for calls and keeps its log. ARGV: session id. Returns 1 if there is such a session.
local session = P .. 'session:' .. ARGV[1]
if redis.call('EXISTS', session) == 0 then return 0 end
redis.call('HSET', session, 'state', 'finished')
return 1
