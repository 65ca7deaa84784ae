-- Opens a session, or keeps the open one with the limits of this record; a finished session is opened again, unless
-- an outside agent has ended its episode and a worker is about to export it.
-- ARGV: session id, record, nonce, key hash, lifetime in s. Returns the nonce from which the session's key is derived.
local session, log = P .. 'session:' .. ARGV[1], P .. 'session_log:' .. ARGV[1]
local found = redis.call('HMGET', session, 'state', 'nonce', 'key')
if found[1] == 'open' then
  redis.call('HSET', session, 'record', ARGV[2])
  redis.call('EXPIRE', session, ARGV[5], 'GT')
  redis.call('EXPIRE', P .. 'session_key:' .. found[3], ARGV[5], 'GT')
  redis.call('EXPIRE', log, ARGV[5], 'GT')
  return found[2]
end
if found[1] and redis.call('HGET', P .. 'outside:' .. ARGV[1], 'state') == 'rewarded' then return found[2] end
local old = found[3]
if old then redis.call('DEL', P .. 'session_key:' .. old) end
redis.call('DEL', session, log)
redis.call('HSET', session, 'state', 'open', 'record', ARGV[2], 'nonce', ARGV[3], 'key', ARGV[4])
redis.call('SET', P .. 'session_key:' .. ARGV[4], ARGV[1], 'EX', ARGV[5])
redis.call('EXPIRE', session, ARGV[5])
return ARGV[3]
