-- Settles members of a group (the first writer of a member wins) and closes the group with its last one.
-- ARGV: group id, service, then for each member: number, outcome, '1' if valid else '0', trajectory, event
-- Returns {known, members settled by this call, closed}; nothing is settled in a corrupted group: {-1, 0, 0}.
local gid, service = ARGV[1], ARGV[2]
local group, data = P .. 'group:' .. gid, P .. 'data:' .. gid
local state = redis.call('HMGET', group, 'phase', 'members', 'min_valid', 'left', 'valid', 'bytes', 'index', 'step')
local phase = state[1]
if not phase and redis.call('EXISTS', group) == 0 then
  local was = redis.call('EXISTS', P .. 'closed:' .. gid)
  return {was, 0, was}
end
if phase ~= 'train' and phase ~= 'eval' then return {-1, 0, 0} end
for i = 2, 8 do
  state[i] = whole(state[i])
  if not state[i] then return {-1, 0, 0} end
end
local members, left, valid, bytes = state[2], state[4], state[5], state[6]

if service == 'scheduler' then pass_when_full() end -- ends of episodes without tokens
local settled = 0
for i = 3, #ARGV, 5 do
  local member = ARGV[i]
  if tonumber(member) < members and redis.call('HSETNX', group, 's' .. member, ARGV[i + 1]) == 1 then
    if phase == 'train' then
      redis.call('HSET', data, member, ARGV[i + 3])
      bytes = bytes + #ARGV[i + 3]
    end
    redis.call('DEL', P .. 'journal:' .. gid .. '.' .. member)
    valid = valid + tonumber(ARGV[i + 2])
    settled = settled + 1
    emit(service, ARGV[i + 4])
  end
end
if settled == 0 then return {1, 0, 0} end
left = left - settled
if left > 0 then
  redis.call('HSET', group, 'left', left, 'valid', valid, 'bytes', bytes)
  return {1, settled, 0}
end

local sent = phase == 'train' and valid >= state[3]
if sent then
  local age = redis.call('ZSCORE', P .. 'ages', gid) or state[8]
  local id = redis.call('XADD', P .. 'ready', '*', 'g', gid, 'i', state[7], 'm', members, 'n', bytes, 'v', age)
  -- By age, then by admission; exact in a double for steps below 2^21 and indices below 2^32.
  redis.call('ZADD', P .. 'waiting', tonumber(age) * 4294967296 + state[7], id)
  count('accepted_groups', 1)
  count('unconsumed_groups', 1)
  count('unconsumed_bytes', bytes)
else
  redis.call('DEL', data)
end
close_group(service, gid, phase, valid, members, sent, bytes)
return {1, settled, 1}
