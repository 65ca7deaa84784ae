-- Closes a group of which Redis and the scheduler know different things, since one of them has lost writes: only
-- one has it open. Nothing of it goes to the learner. With 'sent' it is closed, and waits for the learner as
-- far as the scheduler knows. Idempotent; changes nothing if the group's end is on its way to the scheduler.
-- ARGV: group id, phase, number of members, 'open' or 'sent', service, reason
local gid, service, group = ARGV[1], ARGV[5], P .. 'group:' .. ARGV[1]
local phase = ARGV[2]

local function is_end_on_its_way()
  local id = redis.call('GET', P .. 'closed:' .. gid)
  return id and (id == '' or #redis.call('XRANGE', P .. 'outbox', id, id) > 0)
end

if ARGV[4] == 'open' then
  local is_known = redis.call('EXISTS', group) == 1
  if not is_known and (redis.call('EXISTS', P .. 'data:' .. gid) == 1 or is_end_on_its_way()) then return 0 end
  local found = redis.call('HMGET', group, 'phase', 'members')
  local members = whole(found[2]) or tonumber(ARGV[3])
  phase = found[1] or phase
  for member = 0, members - 1 do redis.call('DEL', P .. 'journal:' .. gid .. '.' .. member) end
  close_group(service, gid, phase, 0, members, false, 0)
end
redis.call('DEL', P .. 'data:' .. gid)
if phase == 'train' then
  emit(service, cmsgpack.pack({type = 'group_dropped', group_id = gid, reason = ARGV[6]}))
end
return 1
