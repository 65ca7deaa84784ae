-- Gives an unsettled member its next attempt number; the same call id gets the same number again.
-- ARGV: group id, member, call id, service, episode id, reason
local group, member = P .. 'group:' .. ARGV[1], ARGV[2]
local members = redis.call('HGET', group, 'members')
if not members or tonumber(member) >= tonumber(members) then return false end
if redis.call('HEXISTS', group, 's' .. member) == 1 then return false end
if redis.call('HGET', group, 'c' .. member) == ARGV[3] then
  return tonumber(redis.call('HGET', group, 'a' .. member))
end
redis.call('HSET', group, 'c' .. member, ARGV[3])
local attempt = redis.call('HINCRBY', group, 'a' .. member, 1)
emit(ARGV[4], cmsgpack.pack({type = 'episode_redelivered', episode_id = ARGV[5], attempt = attempt,
  reason = ARGV[6]}))
return attempt
