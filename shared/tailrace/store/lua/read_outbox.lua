-- Events for the relay: all that it read and did not acknowledge come again, first and in order. ARGV: max
return (read_stream(P .. 'outbox', 'relay', '0', tonumber(ARGV[1])))
