-- Appends events to the outbox, once per call id. ARGV: call id, its lifetime in s (0: forever), service, events ...
if not first_time(ARGV[1], tonumber(ARGV[2])) then return 0 end
for i = 4, #ARGV do emit(ARGV[3], ARGV[i]) end
return #ARGV - 3
