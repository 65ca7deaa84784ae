-- Appends to an open session, once per entry id, and stores the answer of the entries.
-- ARGV: session id, nonce of the session, entry id, answer's name ('' for none), answer, entries ...
-- Returns the length of the log, or -1 if the session is not open.
local session, log = P .. 'session:' .. ARGV[1], P .. 'session_log:' .. ARGV[1]
local found = redis.call('HMGET', session, 'state', 'nonce')
if found[1] ~= 'open' or found[2] ~= ARGV[2] then return -1 end
if redis.call('HSETNX', session, 'e:' .. ARGV[3], '') == 1 then
  for i = 6, #ARGV do redis.call('RPUSH', log, ARGV[i]) end
  if ARGV[4] ~= '' then redis.call('HSET', session, 'a:' .. ARGV[4], ARGV[5]) end
  redis.call('EXPIRE', log, math.max(1, redis.call('TTL', session)))
end
return redis.call('LLEN', log)
