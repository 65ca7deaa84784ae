-- Allocates a new policy version; a repeated (lineage, step) gets its earlier version.
-- ARGV: "<lineage>/<step>", lowest allowed number
local known = redis.call('HGET', P .. 'version_of', ARGV[1])
if known then return tonumber(known) end
pass_when_full()
local version = redis.call('INCR', P .. 'next_version')
if version < tonumber(ARGV[2]) then
  version = tonumber(ARGV[2])
  redis.call('SET', P .. 'next_version', version)
end
redis.call('HSET', P .. 'version_of', ARGV[1], version)
return version
