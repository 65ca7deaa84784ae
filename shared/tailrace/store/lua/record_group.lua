-- Records a group before its episodes are published. Idempotent, also after the group closed.
-- ARGV: group id, phase, index, members, min_valid, record, service, event, optimizer step
local gid, phase, index, members = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local group = P .. 'group:' .. gid
if redis.call('EXISTS', group, P .. 'closed:' .. gid) > 0 then return 0 end
pass_when_full()
redis.call('HSET', group, 'phase', phase, 'index', index, 'members', members, 'min_valid', ARGV[5],
  'left', members, 'valid', 0, 'bytes', 0, 'record', ARGV[6], 'step', ARGV[9])
redis.call('ZADD', P .. 'open', index, gid)
if phase == 'train' then
  local next_index = tonumber(redis.call('HGET', P .. 'counters', 'next_group_index') or '0')
  if tonumber(index) >= next_index then
    redis.call('HSET', P .. 'counters', 'next_group_index', string.format('%d', tonumber(index) + 1))
  end
end
emit(ARGV[7], ARGV[8])
return 1
