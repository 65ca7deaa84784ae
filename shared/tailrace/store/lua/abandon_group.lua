-- Closes an open group that nobody can read; nothing of it goes to the learner. Idempotent.
-- ARGV: group id, phase, number of members, service, then an event for each member that did not end
local gid, phase, members, service = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('DEL', P .. 'group:' .. gid) == 0 then return 0 end
redis.call('DEL', P .. 'data:' .. gid)
redis.call('ZREM', P .. 'open', gid)
redis.call('ZREM', P .. 'ages', gid)
for member = 0, members - 1 do redis.call('DEL', P .. 'journal:' .. gid .. '.' .. member) end
if phase == 'train' then redis.call('XADD', P .. 'closings', 'MAXLEN', 1, '*', 'g', gid) end
redis.call('SET', P .. 'closed:' .. gid, '', 'EX', 3600)
for i = 5, #ARGV do emit(service, ARGV[i]) end
emit(service, cmsgpack.pack({type = 'group_closed', group_id = gid, phase = phase, num_valid = 0,
  num_members = members, sent_to_learner = false, num_bytes = 0}))
return 1
