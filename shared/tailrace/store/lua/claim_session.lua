-- claim_session
-- Who may answer a call that is asked of several replicas. ARGV: session id, the call's name, who asks, for how many ms
-- Returns who may: the one that asks, or the one that has it until its time is over or it lets go.
local claim = P .. 'session_claim:' .. ARGV[1] .. ':' .. ARGV[2]
local holder = redis.call('GET', claim)
if holder and holder ~= ARGV[3] then return holder end
redis.call('SET', claim, ARGV[3], 'PX', ARGV[4])
return ARGV[3]
