-- Reads events for the relay: first the unacknowledged ones in order, then new ones. ARGV: max
return (read_stream(P .. 'outbox', 'relay', '0', tonumber(ARGV[1])))
