-- Appends a finished turn. A writer is named after the message that it settles: 'message/unique'.
-- ARGV: episode id, group id, member, writer, lifetime in s, turn, record
local key, group = P .. 'journal:' .. ARGV[1], P .. 'group:' .. ARGV[2]
if redis.call('HEXISTS', group, 's' .. ARGV[3]) == 1 then return 'settled' end
if redis.call('EXISTS', P .. 'closed:' .. ARGV[2]) == 1 then return 'settled' end
redis.call('HSETNX', key, 'writer', ARGV[4])
local writer = redis.call('HGET', key, 'writer')
if writer ~= ARGV[4] then
  return string.match(writer, '^[^/]*') == string.match(ARGV[4], '^[^/]*') and 'redelivered' or 'fenced'
end
redis.call('HSETNX', key, ARGV[6], ARGV[7])
redis.call('EXPIRE', key, ARGV[5])
return 'appended'
