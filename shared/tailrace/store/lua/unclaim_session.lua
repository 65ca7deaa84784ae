-- unclaim_session
-- Lets a call go. ARGV: session id, the call's name, who has it
local claim = P .. 'session_claim:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('GET', claim) ~= ARGV[3] then return 0 end
return redis.call('DEL', claim)
