-- Episodes that agents outside of the cluster play. ARGV: operation, episode id (holder for `lease`), its arguments.
-- Fields of an episode: state (waiting, leased, rewarded, over), offer, lease_s, holder, seen (length of the session's
-- log at the last look), used (1: an earlier holder used the session), started (time of its first lease), key (hash),
-- digest and result of its reward.
local waiting, leased = P .. 'outside_waiting', P .. 'outside_leased'
local id = ARGV[2]
local one = P .. 'outside:' .. id

local function forget_key(episode)
  local key = redis.call('HGET', episode, 'key')
  if key then redis.call('DEL', P .. 'outside_key:' .. key) end
  redis.call('HDEL', episode, 'key')
end

local function forget_holder(name)
  local episode = P .. 'outside:' .. name
  local holder = redis.call('HGET', episode, 'holder')
  if holder and redis.call('GET', P .. 'outside_of:' .. holder) == name then
    redis.call('DEL', P .. 'outside_of:' .. holder)
  end
  redis.call('HDEL', episode, 'holder')
end

-- Tells whether the member of its group has settled, or its group is closed (or was never recorded).
local function has_settled(name)
  local group, member = string.match(name, '^(.*)%.(.*)$')
  group = P .. 'group:' .. group
  return redis.call('EXISTS', group) == 0 or redis.call('HEXISTS', group, 's' .. member) == 1
end

local function leave_queues()
  redis.call('ZREM', waiting, id)
  redis.call('ZREM', leased, id)
end

local operations = {}

-- offer, lease_s, now, lifetime in s: an episode that was offered before keeps its state, and its time and its
-- lease begin anew: the run may have been stopped. One that is over and settled stays so. Returns the state.
function operations.offer(offer, lease_s, now, lifetime_s)
  local state = redis.call('HGET', one, 'state')
  if state == 'over' and has_settled(id) then return state end
  if not state or state == 'over' then
    forget_key(one)
    redis.call('DEL', one)
    redis.call('ZADD', waiting, now, id)
    state = 'waiting'
  end
  redis.call('HSET', one, 'state', state, 'offer', offer, 'lease_s', lease_s)
  if redis.call('HEXISTS', one, 'started') == 1 then redis.call('HSET', one, 'started', now) end
  if state == 'leased' then redis.call('ZADD', leased, now + lease_s, id) end
  redis.call('EXPIRE', one, lifetime_s)
  return state
end

-- Gives back expired leases; a lease whose session made calls since the last look is prolonged instead.
local function expire(now)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', leased, '-inf', now, 'LIMIT', 0, 64)) do
    local episode = P .. 'outside:' .. name
    local found = redis.call('HMGET', episode, 'state', 'seen', 'lease_s')
    redis.call('ZREM', leased, name)
    if found[1] == 'leased' then
      local length = redis.call('LLEN', P .. 'session_log:' .. name)
      if length > tonumber(found[2] or 0) then
        redis.call('HSET', episode, 'seen', length)
        redis.call('ZADD', leased, now + found[3], name)
      else
        forget_holder(name)
        redis.call('HSET', episode, 'state', 'waiting', 'used', 1)
        redis.call('ZADD', waiting, 0, name)
      end
    end
  end
end

local function take(name, holder, now)
  local episode = P .. 'outside:' .. name
  redis.call('HSETNX', episode, 'started', now)
  local found = redis.call('HMGET', episode, 'offer', 'lease_s', 'used', 'started')
  local seen = redis.call('LLEN', P .. 'session_log:' .. name)
  redis.call('HSET', episode, 'state', 'leased', 'holder', holder, 'seen', seen)
  redis.call('ZADD', leased, now + found[2], name)
  redis.call('SET', P .. 'outside_of:' .. holder, name, 'EX', 604800)
  return {found[1], found[3] or false, found[4]}
end

-- holder, now: returns {offer, used, started, resumed}: the holder's own episode, or else the oldest that waits; or false.
function operations.lease(now)
  local holder = id
  now = tonumber(now)
  local own = redis.call('GET', P .. 'outside_of:' .. holder)
  local found = own and redis.call('HMGET', P .. 'outside:' .. own, 'state', 'holder') or {}
  if found[1] == 'leased' and found[2] == holder then
    local taken = take(own, holder, now)
    return {taken[1], taken[2], taken[3], 1}
  end
  expire(now)
  while true do
    local name = redis.call('ZPOPMIN', waiting)[1]
    if not name then return false end
    if redis.call('HGET', P .. 'outside:' .. name, 'state') == 'waiting' then
      forget_key(P .. 'outside:' .. name) -- from now on: what its earlier holder sent comes too late
      local taken = take(name, holder, now)
      return {taken[1], taken[2], taken[3], 0}
    end
  end
end

-- key hash: the key that opens the episode from now on.
function operations.bind(key)
  if redis.call('EXISTS', one) == 0 then return 0 end
  forget_key(one)
  redis.call('HSET', one, 'key', key)
  redis.call('HDEL', one, 'used')
  redis.call('SET', P .. 'outside_key:' .. key, id, 'EX', math.max(1, redis.call('TTL', one)))
  return 1
end

-- now: prolongs a lease. Returns its length, '0' if the episode is not leased, or false if there is none.
function operations.renew(now)
  local found = redis.call('HMGET', one, 'state', 'lease_s')
  if not found[1] then return false end
  if found[1] ~= 'leased' then return '0' end
  redis.call('ZADD', leased, now + found[2], id)
  return found[2]
end

-- result, digest, hash of the sender's key ('' for any): the first result counts. Returns taken, same, other, over,
-- unknown, or lost if the key does not open the episode any more.
function operations.settle(result, digest, key)
  local found = redis.call('HMGET', one, 'state', 'digest', 'key')
  if not found[1] then return 'unknown' end
  if key ~= '' and found[3] ~= key then return 'lost' end
  if found[2] then return found[2] == digest and 'same' or 'other' end
  if found[1] == 'over' then return 'over' end
  redis.call('HSET', one, 'state', 'rewarded', 'result', result, 'digest', digest)
  leave_queues()
  return 'taken'
end

-- further ids: returns for each {id, time of its first lease, 1 if its member of the group has settled, result}.
function operations.progress(...)
  local found = {}
  for _, name in ipairs({id, ...}) do
    local episode = redis.call('HMGET', P .. 'outside:' .. name, 'state', 'started', 'result')
    found[#found + 1] = {name, episode[2], has_settled(name) and 1 or 0, episode[1] == 'rewarded' and episode[3]}
  end
  return found
end

-- outcome, lifetime in s: no agent gets the episode any more; late rewards find its (first) end.
function operations.close(outcome, lifetime_s)
  leave_queues()
  local state = redis.call('HGET', one, 'state')
  if not state then return 0 end
  if state == 'over' then return 1 end
  forget_holder(id)
  redis.call('HSET', one, 'state', 'over', 'outcome', outcome)
  redis.call('HDEL', one, 'offer', 'result')
  redis.call('EXPIRE', one, lifetime_s)
  local key = redis.call('HGET', one, 'key')
  if key then redis.call('EXPIRE', P .. 'outside_key:' .. key, lifetime_s) end
  return 1
end

-- outcome, lifetime in s: ends an episode as `close` does, unless its agent has ended it. Returns that end, or false.
function operations.give_up(outcome, lifetime_s)
  local found = redis.call('HMGET', one, 'state', 'result')
  if found[1] == 'rewarded' then return found[2] end
  operations.close(outcome, lifetime_s)
  return false
end

return operations[ARGV[1]](unpack(ARGV, 3))
