-- Gives an unsettled member its next attempt number; the same call id gets the same number again.
-- Returns false for a settled member or group, -1 for a corrupted one.
-- ARGV: group id, member, call id, service, episode id, reason
local group, member = P .. 'group:' .. ARGV[1], ARGV[2]
if redis.call('EXISTS', group) == 0 then return false end
local members, attempts = whole(redis.call('HGET', group, 'members')), redis.call('HGET', group, 'a' .. member)
if not members or (attempts and not whole(attempts)) then return -1 end
if tonumber(member) >= members then return false end
if redis.call('HEXISTS', group, 's' .. member) == 1 then return false end
if attempts and redis.call('HGET', group, 'c' .. member) == ARGV[3] then return tonumber(attempts) end
pass_when_full()
redis.call('HSET', group, 'c' .. member, ARGV[3])
local attempt = redis.call('HINCRBY', group, 'a' .. member, 1)
emit(ARGV[4], cmsgpack.pack({type = 'episode_redelivered', episode_id = ARGV[5], attempt = attempt,
  reason = ARGV[6]}))
return attempt
