-- Takes closed groups for the learner: those it has taken already, after place `after`, then new ones,
-- those with the oldest first tokens first, then by index, which turn from unconsumed into retained.
-- An old group is one whose first tokens are of step `old_step` or before: the learner's step is the last
-- that may train them. While as many old groups are open as the step has places left, only old ones go.
-- ARGV: after, places left in the step, old_step
-- Returns the newest closing and, for each group: place, stream id, group id, index, bytes, trajectories.
local places, old_step = tonumber(ARGV[2]), tonumber(ARGV[3])
local newest = redis.call('XREVRANGE', P .. 'closings', '+', '-', 'COUNT', 1)[1]
local taken = {newest and newest[1] or '0-0'}

local function give(id, place)
  local entry = redis.call('XRANGE', P .. 'ready', id, id)[1]
  if not entry then -- deleted by nobody of ours
    redis.call('ZREM', P .. 'taken', id)
    return 0
  end
  local fields = entry[2]
  local gid, members, bytes = fields[2], tonumber(fields[6]), tonumber(fields[8])
  local numbers = {}
  for member = 0, members - 1 do numbers[#numbers + 1] = member end
  local payloads = redis.call('HMGET', P .. 'data:' .. gid, unpack(numbers))
  taken[#taken + 1] = {place, id, gid, fields[4], bytes, payloads}
  places = places - 1
  return bytes
end

local function is_old(id)
  local entry = redis.call('XRANGE', P .. 'ready', id, id)[1]
  return not entry or tonumber(entry[2][10]) <= old_step
end

local own = redis.call('ZRANGEBYSCORE', P .. 'taken', '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, places)
for i = 1, #own, 2 do give(own[i], tonumber(own[i + 1])) end

local num_open = redis.call('ZCOUNT', P .. 'ages', '-inf', old_step)
while places > 0 do
  local id = redis.call('ZRANGE', P .. 'waiting', 0, 0)[1]
  if not id or (places <= num_open and not is_old(id)) then break end
  redis.call('ZREM', P .. 'waiting', id) -- first: a full Redis allows the rest after a deletion
  local place = redis.call('HINCRBY', P .. 'counters', 'num_taken', 1)
  redis.call('ZADD', P .. 'taken', place, id)
  local bytes = give(id, place)
  count('unconsumed_groups', -1)
  count('unconsumed_bytes', -bytes)
  count('retained_groups', 1)
  count('retained_bytes', bytes)
end
if old_step >= 0 then
  redis.call('ZREM', P .. 'waiting', '') -- deletes nothing: a full Redis allows the next write after it
  redis.call('HSET', P .. 'counters', 'places_kept', places)
end
return taken
