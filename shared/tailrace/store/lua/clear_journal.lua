-- Deletes the turns of an episode of `writer`; the writer stays. ARGV: episode id, writer
local key = P .. 'journal:' .. ARGV[1]
if redis.call('HGET', key, 'writer') ~= ARGV[2] then return 'fenced' end
for _, field in ipairs(redis.call('HKEYS', key)) do
  if field ~= 'writer' then redis.call('HDEL', key, field) end
end
return 'cleared'
