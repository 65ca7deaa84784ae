-- unclaim_session
-- Releases a claim. ARGV: session id, name of the call, holder
local claim = P .. 'session_claim:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('GET', claim) ~= ARGV[3] then return 0 end
return redis.call('DEL', claim)
