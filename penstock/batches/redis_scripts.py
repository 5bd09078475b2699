"""The queue of batches in Redis: its keys, and Lua scripts for steps that must be whole or not at all.

    file:{id}                   a file's record, as JSON
    files:{tenant}              sorted set of its file ids, numbered as they came; `stored`: their bytes by tenant
    expiring                    sorted set of file ids, by the time when they expire
    batch:{id}                  hash: record, status, ending, completed, failed, input; owner and lease_until of its job
    batches:{tenant}            sorted set of its batch ids, numbered as they came
    served                      sorted set of models that gateways serve, the names of each as JSON, by until when
    active                      sorted set of batches that are not over or have lines left, numbered as they came
    line:{batch}:{number}       hash of one line: where it is in the input, attempts, owner, journal, and its answer
    order:{batch}               list of its lines' numbers, as in the input
    models:{batch}              set of the models that its lines name
    names:{batch}               set of its custom_ids, while it is validated
    pending:{batch}:{model}     sorted set of lines that wait, by the time before which they are not to be tried
    leased:{batch}              sorted set of lines that are leased, by the time when the lease ends

A full Redis (maxmemory) refuses a script at its first write, if that is one that needs memory, and never afterwards:
scripts that store something begin with that.

Sorted sets and not streams, because a line may have to wait (backoff), only some models are served by a gateway, and
batches take turns: a consumer group hands out entries in their order to anybody.
"""

from __future__ import annotations

PREFIX = "penstock:batches:"
NUMBER = "{:08d}"  # of a line, so that members of a sorted set with equal scores are in order

_COMMON = (
    f"local P = '{PREFIX}'"
    + """
local function batch(id) return P .. 'batch:' .. id end
local function line(id, number) return P .. 'line:' .. id .. ':' .. number end
local function leased(id) return P .. 'leased:' .. id end
local function pending(id, model) return P .. 'pending:' .. id .. ':' .. model end
local function active() return redis.call('ZRANGE', P .. 'active', 0, -1) end
local OVER = {failed = true, completed = true, expired = true, cancelled = true}
local function status(id) return redis.call('HGET', batch(id), 'status') end
local function append(key, id)  -- created_at would not do: many are created in one second
    local last = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    redis.call('ZADD', key, (tonumber(last[2]) or 0) + 1, id)
end
local function reader_of(file)  -- a batch that is not over and has this input
    for _, id in ipairs(active()) do
        local found = redis.call('HMGET', batch(id), 'input', 'status')
        if found[1] == file and not OVER[found[2]] then return id end
    end
end
local function forget_file(id)
    local record = cjson.decode(redis.call('GET', P .. 'file:' .. id))
    redis.call('DEL', P .. 'file:' .. id)
    redis.call('ZREM', P .. 'files:' .. record.tenant, id)
    redis.call('ZREM', P .. 'expiring', id)
    redis.call('HINCRBY', P .. 'stored', record.tenant, -record.bytes)
end
local function add_file(id, tenant, bytes, expires_at, record)
    if redis.call('EXISTS', P .. 'file:' .. id) == 1 then forget_file(id) end
    redis.call('SET', P .. 'file:' .. id, record)
    append(P .. 'files:' .. tenant, id)
    redis.call('HINCRBY', P .. 'stored', tenant, bytes)
    if expires_at ~= '' then redis.call('ZADD', P .. 'expiring', expires_at, id) end
end
local function wait_again(id, number, not_before)
    redis.call('ZREM', leased(id), number)
    redis.call('HDEL', line(id, number), 'owner')
    redis.call('ZADD', pending(id, redis.call('HGET', line(id, number), 'model')), not_before, number)
end
local function is_mine(id, number, owner) return redis.call('HGET', line(id, number), 'owner') == owner end
local function is_free(id, number)  -- also for whoever had it until its lease ended: that one still works on it
    local model = redis.call('HGET', line(id, number), 'model')
    return status(id) == 'in_progress' and model and redis.call('ZSCORE', pending(id, model), number)
end
local function wait_no_more(id, number)
    redis.call('ZREM', pending(id, redis.call('HGET', line(id, number), 'model')), number)
end
"""
)

# ARGV: the most files and bytes of the tenant (-1: any), then what `add_file` takes. Returns whether it was added, and
# the tenant's files and bytes before.
ADD_FILE = (
    _COMMON
    + """
local files, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local count = redis.call('ZCARD', P .. 'files:' .. ARGV[4])
local size = tonumber(redis.call('HGET', P .. 'stored', ARGV[4]) or '0')
if files >= 0 and (count >= files or size + tonumber(ARGV[5]) > bytes) then return {0, count, size} end
add_file(ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return {1, count, size}
"""
)
# ARGV: file, tenant. Returns 1, 0 if there is none, or the batch that reads it.
DELETE_FILE = (
    _COMMON
    + """
if not redis.call('ZSCORE', P .. 'files:' .. ARGV[2], ARGV[1]) then return 0 end
local reader = reader_of(ARGV[1])
if reader then return reader end
forget_file(ARGV[1])
return 1
"""
)
# ARGV: now. Returns the files that were forgotten.
EXPIRED_FILES = (
    _COMMON
    + """
local gone = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'expiring', '-inf', ARGV[1])) do
    if not reader_of(id) then
        forget_file(id)
        gone[#gone + 1] = id
    end
end
return gone
"""
)
# ARGV: id, tenant, input, status, record.
ADD_BATCH = (
    _COMMON
    + """
local fields = {'input', ARGV[3], 'status', ARGV[4], 'record', ARGV[5], 'ending', '', 'completed', 0, 'failed', 0}
redis.call('HSET', batch(ARGV[1]), 'lease_until', 0, unpack(fields))
append(P .. 'batches:' .. ARGV[2], ARGV[1])
append(P .. 'active', ARGV[1])
"""
)
# ARGV: id, the status that it must have, the owner that its job must have ('': any), status, ending, record, then the
# arguments of `add_file` for each file that it has made. Returns whether it was saved.
SAVE_BATCH = (
    _COMMON
    + """
local found = redis.call('HMGET', batch(ARGV[1]), 'status', 'owner')
if found[1] ~= ARGV[2] or (ARGV[3] ~= '' and found[2] ~= ARGV[3]) then return 0 end
redis.call('HSET', batch(ARGV[1]), 'status', ARGV[4], 'ending', ARGV[5], 'record', ARGV[6])
for at = 7, #ARGV, 5 do
    add_file(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4])
end
return 1
"""
)
# ARGV: now. Frees leases whose time has passed. Returns batches that may change by themselves, each with its leases.
ADVANCE = (
    _COMMON
    + """
local found = {}
for _, id in ipairs(active()) do
    for _, number in ipairs(redis.call('ZRANGEBYSCORE', leased(id), '-inf', ARGV[1])) do
        redis.call('HINCRBY', line(id, number), 'losses', 1)
        wait_again(id, number, 0)
    end
    local now = status(id)
    if now == 'in_progress' or now == 'cancelling' then
        local fields = redis.call('HMGET', batch(id), 'record', 'status', 'completed', 'failed')
        fields[5] = redis.call('ZCARD', leased(id))
        found[#found + 1] = fields
    end
end
return found
"""
)
# ARGV: owner, now, when the lease ends. Returns the batch that was claimed, or nothing. One that is over is tidied up.
CLAIM_JOB = (
    _COMMON
    + """
for _, id in ipairs(active()) do
    local fields = redis.call('HMGET', batch(id), 'record', 'status', 'completed', 'failed', 'ending', 'lease_until')
    local is_due = fields[2] == 'validating' or fields[2] == 'finalizing' or OVER[fields[2]]
        or (fields[2] == 'cancelling' and fields[5] ~= '')
    if is_due and tonumber(fields[6]) <= tonumber(ARGV[2]) then
        redis.call('HSET', batch(id), 'owner', ARGV[1], 'lease_until', ARGV[3])
        return fields
    end
end
"""
)
# ARGV: id, owner, when the lease of the job ends.
LEASE_JOB = (
    _COMMON
    + """
if redis.call('HGET', batch(ARGV[1]), 'owner') == ARGV[2] then
    redis.call('HSET', batch(ARGV[1]), 'lease_until', ARGV[3])
end
"""
)
# ARGV: owner, now, when the leases end, how many, then models. Returns, for each batch, its record and its lines.
LEASE = (
    _COMMON
    + """
local owner, now, till, left = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local running = {}
for _, id in ipairs(active()) do
    if status(id) == 'in_progress' then running[#running + 1] = id end
end
local found = {}
for at, id in ipairs(running) do
    local share, lines = math.ceil(left / (#running - at + 1)), {}
    for model = 5, #ARGV do
        local key = pending(id, ARGV[model])
        for _, number in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, share - #lines)) do
            redis.call('ZREM', key, number)
            redis.call('ZADD', leased(id), till, number)
            redis.call('HSET', line(id, number), 'owner', owner)
            lines[#lines + 1] = {number, unpack(redis.call('HMGET', line(id, number), 'custom_id', 'model', 'start',
                'size', 'seed', 'attempts', 'losses', 'journal'))}
        end
    end
    left = left - #lines
    if #lines > 0 then found[#found + 1] = {redis.call('HGET', batch(id), 'record'), lines} end
end
return found
"""
)
# ARGV: owner, when the leases end, then for each line its batch, number, whether it has a new journal, and that.
# Returns for each whether it has its lease, be it anew.
RENEW = (
    _COMMON
    + """
local kept = {}
for at = 3, #ARGV, 4 do
    local id, number = ARGV[at], ARGV[at + 1]
    local mine = is_mine(id, number, ARGV[1])
    if mine or is_free(id, number) then
        redis.call('ZADD', leased(id), ARGV[2], number)
        if not mine then
            redis.call('HSET', line(id, number), 'owner', ARGV[1])
            wait_no_more(id, number)
        end
        if ARGV[at + 2] == '1' then redis.call('HSET', line(id, number), 'journal', ARGV[at + 3], 'losses', 0) end
        kept[#kept + 1] = 1
    else
        kept[#kept + 1] = 0
    end
end
return kept
"""
)
# ARGV: owner, batch, number, completed or failed, HTTP status, request id, body. Returns whether it was taken.
ANSWER = (
    _COMMON
    + """
local id, number = ARGV[2], ARGV[3]
local now = status(id)
local mine = is_mine(id, number, ARGV[1]) and (now == 'in_progress' or now == 'cancelling')
if not mine and not is_free(id, number) then return 0 end
redis.call('HSET', line(id, number), 'status', ARGV[5], 'request_id', ARGV[6], 'body', ARGV[7])
redis.call('HDEL', line(id, number), 'owner', 'journal')
redis.call('ZREM', leased(id), number)
wait_no_more(id, number)
redis.call('HINCRBY', batch(id), ARGV[4], 1)
return 1
"""
)
# ARGV: owner, batch, number, the time before which it is not to be tried, attempts to add, whether it has a new
# journal, and that.
RELEASE = (
    _COMMON
    + """
local id, number = ARGV[2], ARGV[3]
if is_mine(id, number, ARGV[1]) then
    redis.call('HINCRBY', line(id, number), 'attempts', ARGV[5])
    if ARGV[6] == '1' then redis.call('HSET', line(id, number), 'journal', ARGV[7]) end
    wait_again(id, number, ARGV[4])
end
"""
)
# ARGV: batch, the owner of its job, then for each line its number, custom_id, model, start, size and seed. Returns the
# numbers of those whose custom_id came before, or nothing if the job has another owner by now.
ADD_LINES = (
    _COMMON
    + """
local id, repeated = ARGV[1], {}
if redis.call('HGET', batch(id), 'owner') ~= ARGV[2] then return false end
for at = 3, #ARGV, 6 do
    local number, name, model = ARGV[at], ARGV[at + 1], ARGV[at + 2]
    if redis.call('SADD', P .. 'names:' .. id, name) == 0 then
        repeated[#repeated + 1] = number
    else
        redis.call('RPUSH', P .. 'order:' .. id, number)
        redis.call('SADD', P .. 'models:' .. id, model)
        redis.call('HSET', line(id, number), 'custom_id', name, 'model', model, 'start', ARGV[at + 3], 'size',
            ARGV[at + 4], 'seed', ARGV[at + 5], 'attempts', 0, 'losses', 0)
        redis.call('ZADD', pending(id, model), 0, number)
    end
end
return repeated
"""
)
# ARGV: batch, the owner of its job, how many. Forgets the last lines. Returns how many are left, or nothing if the job
# has another owner by now. A batch that is over is then no longer active.
FORGET_LINES = (
    _COMMON
    + """
local id = ARGV[1]
if redis.call('HGET', batch(id), 'owner') ~= ARGV[2] then return false end
for _, number in ipairs(redis.call('LRANGE', P .. 'order:' .. id, -ARGV[3], -1)) do
    redis.call('DEL', line(id, number))
end
redis.call('LTRIM', P .. 'order:' .. id, 0, -ARGV[3] - 1)
local left = redis.call('LLEN', P .. 'order:' .. id)
if left == 0 then
    for _, model in ipairs(redis.call('SMEMBERS', P .. 'models:' .. id)) do redis.call('DEL', pending(id, model)) end
    redis.call('DEL', P .. 'models:' .. id, P .. 'names:' .. id, leased(id))
    if OVER[status(id)] then redis.call('ZREM', P .. 'active', id) end
end
return left
"""
)
