-- Takes closed groups for the learner: those it has taken already, after place `after`, then new ones,
-- those with the oldest first tokens first, then by index, which turn from unconsumed into retained.
-- An old group is one whose first tokens are of step `old_step` or before: the learner's step is the last
-- that may train them. While as many old groups are open as the step has places left, only old ones go.
-- ARGV: after, places left in the step, old_step
-- Returns the newest closing, 1 if a checkpoint would free a Redis that is nearly full, and for each group: place, stream id, group id, index, bytes, trajectories.
local AT_ONCE = 4096 -- members; Lua's stack has room for 8,000 numbers
local places, old_step = tonumber(ARGV[2]), tonumber(ARGV[3])
local newest = redis.call('XREVRANGE', P .. 'closings', '+', '-', 'COUNT', 1)[1]
local taken = {newest and newest[1] or '0-0', 0}

-- Gives a group to the learner; of a corrupted entry, its fields in place of trajectories. Returns its bytes.
local function give(id, place)
  local fields = ready_fields(id)
  if not fields then -- deleted by nobody of ours
    redis.call('ZREM', P .. 'taken', id)
    return 0
  end
  places = places - 1
  local gid, members, bytes = fields[2], whole(fields[6]), whole(fields[8])
  local data = P .. 'data:' .. gid
  if not (bytes and whole(fields[4]) and members == redis.call('HLEN', data)) then
    taken[#taken + 1] = {place, id, gid, '', 0, fields}
    return bytes or 0
  end
  local payloads = {}
  for first = 0, members - 1, AT_ONCE do
    local numbers = {}
    for member = first, math.min(first + AT_ONCE, members) - 1 do numbers[#numbers + 1] = member end
    for _, payload in ipairs(redis.call('HMGET', data, unpack(numbers))) do payloads[#payloads + 1] = payload end
  end
  taken[#taken + 1] = {place, id, gid, fields[4], bytes, payloads}
  return bytes
end

local function is_old(id)
  local fields = ready_fields(id)
  local step = fields and whole(fields[10])
  return not step or step <= old_step
end

-- Returns a place above all that were given, also where the counter is corrupted or began again.
local function next_place()
  local last = redis.call('ZREVRANGE', P .. 'taken', 0, 0, 'WITHSCORES')[2]
  local counted = whole(redis.call('HGET', P .. 'counters', 'num_taken'))
  if not counted or counted > 2 ^ 52 then counted = 0 end
  local place = math.max(counted, tonumber(last or 0), tonumber(ARGV[1])) + 1
  redis.call('HSET', P .. 'counters', 'num_taken', string.format('%d', place))
  return place
end

local own = redis.call('ZRANGEBYSCORE', P .. 'taken', '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, places)
for i = 1, #own, 2 do give(own[i], tonumber(own[i + 1])) end

local num_open = redis.call('ZCOUNT', P .. 'ages', '-inf', old_step)
while places > 0 do
  local id = redis.call('ZRANGE', P .. 'waiting', 0, 0)[1]
  if not id or (places <= num_open and not is_old(id)) then break end
  redis.call('ZREM', P .. 'waiting', id) -- first: a full Redis allows the rest after a deletion
  local place = next_place()
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
local memory = redis.call('INFO', 'memory')
local used, max = string.match(memory, 'used_memory:(%d+)'), string.match(memory, '[^_]maxmemory:(%d+)')
local retained = whole(redis.call('HGET', P .. 'counters', 'retained_bytes')) or 0
if used and max and max ~= '0' and tonumber(used) > 0.8 * tonumber(max) and retained > 0.05 * tonumber(max) then taken[2] = 1 end
return taken
