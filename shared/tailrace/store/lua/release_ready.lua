-- Removes groups from the buffer: trained and in a durable checkpoint, or dropped (returned to credit).
-- Deletions come first, so that it also works in a full Redis; idempotent.
-- ARGV: 'trained' or 'dropped', reason, event id ('' for none), service, event, stream ids ...
local dropped = ARGV[1] == 'dropped'
local released = 0
for i = 6, #ARGV do
  local id = ARGV[i]
  local fields = ready_fields(id)
  if fields then
    local gid, bytes = fields[2], whole(fields[8]) or 0
    local kind = redis.call('ZREM', P .. 'taken', id) == 1 and 'retained' or 'unconsumed'
    redis.call('XDEL', P .. 'ready', id)
    redis.call('ZREM', P .. 'waiting', id)
    redis.call('DEL', P .. 'data:' .. gid)
    count(kind .. '_groups', -1)
    count(kind .. '_bytes', -bytes)
    if dropped then
      count('accepted_groups', -1)
      emit(ARGV[4], cmsgpack.pack({type = 'group_dropped', group_id = gid, reason = ARGV[2]}))
    end
    released = released + 1
  end
end
if ARGV[3] ~= '' and first_time(ARGV[3], 0) then emit(ARGV[4], ARGV[5]) end
return released
