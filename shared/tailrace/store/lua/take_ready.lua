-- Reads closed groups for the learner: unacknowledged ones after `after`, then new ones, which
-- turn from unconsumed into retained.
-- ARGV: after, max groups. Returns for each: stream id, group id, index, bytes, members' trajectories.
local entries, num_new = read_stream(P .. 'ready', 'learner', ARGV[1], tonumber(ARGV[2]))
local taken = {}
for i, entry in ipairs(entries) do
  local fields = entry[2]
  if fields then
    local gid, index, members, bytes = fields[2], fields[4], tonumber(fields[6]), tonumber(fields[8])
    if i > #entries - num_new then
      count('unconsumed_groups', -1)
      count('unconsumed_bytes', -bytes)
      count('retained_groups', 1)
      count('retained_bytes', bytes)
    end
    local numbers = {}
    for member = 0, members - 1 do numbers[#numbers + 1] = member end
    taken[#taken + 1] = {entry[1], gid, index, bytes, redis.call('HMGET', P .. 'data:' .. gid, unpack(numbers))}
  end
end
return taken
