-- Deletes a session. ARGV: session id
local session = P .. 'session:' .. ARGV[1]
local key = redis.call('HGET', session, 'key')
if key then redis.call('DEL', P .. 'session_key:' .. key) end
return redis.call('DEL', session, P .. 'session_log:' .. ARGV[1])
