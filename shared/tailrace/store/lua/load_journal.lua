-- Makes `writer` the journal's only writer and returns its turns; a settled episode has none.
-- ARGV: episode id, group id, member, writer, lifetime in s
local key, group = P .. 'journal:' .. ARGV[1], P .. 'group:' .. ARGV[2]
if redis.call('HEXISTS', group, 's' .. ARGV[3]) == 1 then return {} end
if redis.call('EXISTS', P .. 'closed:' .. ARGV[2]) == 1 then return {} end
redis.call('HSET', key, 'writer', ARGV[4])
redis.call('EXPIRE', key, ARGV[5])
return redis.call('HGETALL', key)
