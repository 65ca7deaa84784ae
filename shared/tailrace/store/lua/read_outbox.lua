-- Reads events for the relay: first the unacknowledged ones in order, those after `after`, then new ones.
-- ARGV: max, after
return (read_stream(P .. 'outbox', 'relay', ARGV[2], tonumber(ARGV[1])))
