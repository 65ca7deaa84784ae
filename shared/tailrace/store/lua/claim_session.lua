-- claim_session
-- Claims a call that several replicas received. ARGV: session id, name of the call, claimant, duration in ms
-- Returns the holder: the claimant, or the earlier holder until its claim expires or is released.
local claim = P .. 'session_claim:' .. ARGV[1] .. ':' .. ARGV[2]
local holder = redis.call('GET', claim)
if holder and holder ~= ARGV[3] then return holder end
redis.call('SET', claim, ARGV[3], 'PX', ARGV[4])
return ARGV[3]
