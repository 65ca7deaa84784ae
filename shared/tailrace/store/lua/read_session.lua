-- Reads a session and its log. ARGV: session id, number of known entries, requested answer ('' for none)
-- Returns false for an unknown session, else {state, record, nonce, entries after the known ones, the answer or false}.
local session = P .. 'session:' .. ARGV[1]
local found = redis.call('HMGET', session, 'state', 'record', 'nonce', 'a:' .. ARGV[3])
if not found[1] then return false end
return {found[1], found[2], found[3], redis.call('LRANGE', P .. 'session_log:' .. ARGV[1], ARGV[2], -1), found[4]}
