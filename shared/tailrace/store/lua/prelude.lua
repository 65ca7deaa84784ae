-- Shared by all scripts. KEYS[1] is the run's key prefix; its braces put every key derived from it
-- on the same cluster slot.
local P = KEYS[1]

-- Lets a full Redis take this script's writes, as it does after a deletion: they are small, and what frees
-- memory waits for them. Payloads of episodes wait for room.
local function pass_when_full()
  redis.call('ZREM', P .. 'none', '') -- deletes nothing
end

-- Appends an event to the outbox and returns the entry's id, its position in the total order.
local function emit(service, body)
  return redis.call('XADD', P .. 'outbox', '*', 's', service, 'b', body)
end

-- Leaves a corrupted counter as it is: who reads the counters sets it aside.
local function count(field, by)
  redis.pcall('HINCRBY', P .. 'counters', field, by)
end

-- Returns the whole number that a field holds; false or nil if it is missing or corrupted.
local function whole(text)
  return text and string.match(text, '^%-?%d+$') and tonumber(text)
end

-- Returns the fields of a closed group's entry; nil if there is none.
local function ready_fields(id)
  local found = redis.pcall('XRANGE', P .. 'ready', id, id) -- an error if `id` is no id of a stream
  return found[1] and found[1][2]
end

-- Closes an open group. Late writers learn that it is closed for an hour, from the id of its event.
local function close_group(service, gid, phase, valid, members, sent, bytes)
  redis.call('DEL', P .. 'group:' .. gid)
  redis.call('ZREM', P .. 'open', gid)
  redis.call('ZREM', P .. 'ages', gid)
  if phase == 'train' then redis.call('XADD', P .. 'closings', 'MAXLEN', 1, '*', 'g', gid) end
  local id = emit(service, cmsgpack.pack({type = 'group_closed', group_id = gid, phase = phase,
    num_valid = valid, num_members = members, sent_to_learner = sent, num_bytes = bytes}))
  redis.call('SET', P .. 'closed:' .. gid, id, 'EX', 3600)
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
