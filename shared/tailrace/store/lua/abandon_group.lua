-- Closes an open group that nobody can read; nothing of it goes to the learner. Idempotent.
-- ARGV: group id, phase, number of members, service, then an event for each member that did not end
local gid, phase, members, service = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('EXISTS', P .. 'group:' .. gid) == 0 then return 0 end
redis.call('DEL', P .. 'data:' .. gid)
for member = 0, members - 1 do redis.call('DEL', P .. 'journal:' .. gid .. '.' .. member) end
for i = 5, #ARGV do emit(service, ARGV[i]) end
close_group(service, gid, phase, 0, members, false, 0)
return 1
