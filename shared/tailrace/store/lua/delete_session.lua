-- Deletes a session. ARGV: session id, nonce of the session ('' for any)
local session = P .. 'session:' .. ARGV[1]
local key, nonce = unpack(redis.call('HMGET', session, 'key', 'nonce'))
if ARGV[2] ~= '' and nonce ~= ARGV[2] then return 0 end
if key then redis.call('DEL', P .. 'session_key:' .. key) end
return redis.call('DEL', session, P .. 'session_log:' .. ARGV[1])
