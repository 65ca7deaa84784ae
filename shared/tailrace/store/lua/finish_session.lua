-- Closes a session for calls; its log stays. ARGV: session id. Returns 1 if the session exists.
local session = P .. 'session:' .. ARGV[1]
if redis.call('EXISTS', session) == 0 then return 0 end
redis.call('HSET', session, 'state', 'finished')
return 1
