-- Closes a session for calls; its log stays. ARGV: session id, key hash ('' for any)
-- Returns 1, or 0 if the session does not exist or another key opens the one that has this id now.
local session = P .. 'session:' .. ARGV[1]
local key = redis.call('HGET', session, 'key')
if not key or (ARGV[2] ~= '' and key ~= ARGV[2]) then return 0 end
redis.call('HSET', session, 'state', 'finished')
return 1
