-- Stores the lineage and optimizer step of a version. ARGV: policy version, entry
pass_when_full()
redis.call('HSET', P .. 'versions', ARGV[1], ARGV[2])
return 1
