-- Shared by all scripts. KEYS[1] is the run's key prefix; its braces put every key derived from it
-- on the same cluster slot.
local P = KEYS[1]

-- Appends an event to the outbox; the entry's id is its position in the total order.
local function emit(service, body)
  redis.call('XADD', P .. 'outbox', '*', 's', service, 'b', body)
end

local function count(field, by)
  redis.call('HINCRBY', P .. 'counters', field, by)
end

-- Closes an open group. Late writers learn that it is closed for an hour.
local function close_group(service, gid, phase, valid, members, sent, bytes)
  redis.call('DEL', P .. 'group:' .. gid)
  redis.call('ZREM', P .. 'open', gid)
  redis.call('ZREM', P .. 'ages', gid)
  if phase == 'train' then redis.call('XADD', P .. 'closings', 'MAXLEN', 1, '*', 'g', gid) end
  redis.call('SET', P .. 'closed:' .. gid, '', 'EX', 3600)
  emit(service, cmsgpack.pack({type = 'group_closed', group_id = gid, phase = phase, num_valid = valid,
    num_members = members, sent_to_learner = sent, num_bytes = bytes}))
end

-- Returns true for the first call with `id`. Ids with a lifetime expire; the others never expire.
local function first_time(id, lifetime_s)
  local now = tonumber(redis.call('TIME')[1])
  local score = '+inf'
  if lifetime_s > 0 then score = string.format('%d', now + lifetime_s) end
  if redis.call('ZADD', P .. 'seen', 'NX', score, id) == 0 then return false end
  redis.call('ZREMRANGEBYSCORE', P .. 'seen', '-inf', string.format('(%d', now))
  return true
end

-- Reads a stream for its one consumer: its unacknowledged entries after `after`, then new ones.
-- Returns the entries and how many of them are new.
local function read_stream(key, group, after, max)
  local own = redis.pcall('XREADGROUP', 'GROUP', group, group, 'COUNT', max, 'STREAMS', key, after)
  if own and own.err then
    if not string.find(own.err, 'NOGROUP', 1, true) then error(own.err) end
    redis.call('XGROUP', 'CREATE', key, group, '0', 'MKSTREAM')
    own = false
  end
  local entries = own and own[1][2] or {}
  local num_old = #entries
  if num_old < max then
    local new = redis.call('XREADGROUP', 'GROUP', group, group, 'COUNT', max - num_old, 'STREAMS', key, '>')
    if new then
      for _, entry in ipairs(new[1][2]) do entries[#entries + 1] = entry end
    end
  end
  return entries, #entries - num_old
end
