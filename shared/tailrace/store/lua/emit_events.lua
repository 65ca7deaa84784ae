-- Appends events to the outbox, once per call id. ARGV: call id, its lifetime in s (0: forever), service, events ...
pass_when_full()
if not first_time(ARGV[1], tonumber(ARGV[2])) then return 0 end
for i = 4, #ARGV do emit(ARGV[3], ARGV[i]) end
return #ARGV - 3
