-- Appends a finished turn. ARGV: episode id, group id, member, writer, lifetime in s, turn, record
local key, group = P .. 'journal:' .. ARGV[1], P .. 'group:' .. ARGV[2]
if redis.call('HEXISTS', group, 's' .. ARGV[3]) == 1 then return 'settled' end
if redis.call('EXISTS', P .. 'closed:' .. ARGV[2]) == 1 then return 'settled' end
redis.call('HSETNX', key, 'writer', ARGV[4])
if redis.call('HGET', key, 'writer') ~= ARGV[4] then return 'fenced' end
redis.call('HSETNX', key, ARGV[6], ARGV[7])
redis.call('EXPIRE', key, ARGV[5])
return 'appended'
