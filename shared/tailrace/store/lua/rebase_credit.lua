-- Recounts accepted groups for a lineage that resumes after `trained` groups: those and all still in the
-- buffer. ARGV: trained groups
local accepted = tonumber(ARGV[1]) + redis.call('XLEN', P .. 'ready')
redis.call('HSET', P .. 'counters', 'accepted_groups', string.format('%d', accepted))
return accepted
