-- Notes the optimizer step of the first tokens of open train groups; the first note counts.
-- With 'defer', replaces it: the group may then be older than the bound without holding up the learner.
-- ARGV: '' or 'defer', then for each group: id, step
pass_when_full()
for i = 2, #ARGV, 2 do
  local gid, step = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', P .. 'group:' .. gid, 'phase') == 'train' then
    if ARGV[1] == 'defer' then
      redis.call('ZADD', P .. 'ages', step, gid)
      redis.call('XADD', P .. 'closings', 'MAXLEN', 1, '*', 'g', gid)
    else
      redis.call('ZADD', P .. 'ages', 'NX', step, gid)
    end
  end
end
return 1
