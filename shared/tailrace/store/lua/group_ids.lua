-- Returns the ids of open groups, and of closed ones that wait for the learner or for a checkpoint.
local sent = {}
for _, entry in ipairs(redis.call('XRANGE', P .. 'ready', '-', '+')) do sent[#sent + 1] = entry[2][2] end
return {redis.call('ZRANGE', P .. 'open', 0, -1), sent}
