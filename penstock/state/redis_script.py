"""What must be atomic among gateways, as Redis runs it: a batch of settlements and reservations. Mirrors `MemoryStore`.

One argument holds the whole batch, as packing arguments one by one is what costs a client its time. The keys follow
from it and are not declared, so this is for a single Redis, with replicas or without, and not for a cluster.
"""

from __future__ import annotations

# ARGV: prefix of all keys, then in MessagePack: time (-1: the server's), seconds of a lease, seconds to keep spend,
#   the gateway, how many of its settlements were acknowledged before these,
#   settlements: tenant, model, id, second of the reservation, change of its requests, of its tokens, cost reserved,
#                day, then requests, prompt, cached and output tokens, cost;
#   reservations: tenant, model, id, requests, tokens, cost, day,
#                 then limits of requests, tokens, concurrency, spend of the day, of the month (-1: none).
# Returns for each reservation: refusal (0: none), wait in ms, requests left, their reset in ms, tokens left, their
#   reset in ms, second, what is left of a budget that refused it, spent today, spent this month.
BATCH = """
local prefix = ARGV[1] .. ':'
local now, lease, keep, gateway, acknowledged, settlements, reservations = unpack(cmsgpack.unpack(ARGV[2]))
if now < 0 then
    local time = redis.call('TIME')
    now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local second = math.floor(now)
local DAY = 86400  -- the longest outage after which a gateway may still send again what has run
local AMOUNTS = {'requests', 'prompt_tokens', 'cached_tokens', 'output_tokens', 'cost'}

local function correct(key, at, change)
    if change ~= 0 and redis.call('HEXISTS', key, at) == 1 then
        redis.call('HINCRBY', key, at, change)
    end
end

local function settle(tenant, model, id, at, requests_change, tokens_change, reserved, day, ...)
    local amounts, whose = {...}, tenant .. ':' .. model
    local usage = prefix .. 'usage:' .. day
    correct(prefix .. 'requests:' .. whose, at, requests_change)
    correct(prefix .. 'tokens:' .. whose, at, tokens_change)
    redis.call('ZREM', prefix .. 'leases:' .. whose, id)
    if reserved > 0 then
        redis.call('ZREM', prefix .. 'reserved:' .. tenant, id .. ' ' .. string.format('%.0f', reserved))
    end
    for i, name in ipairs(AMOUNTS) do
        if amounts[i] ~= 0 then
            redis.call('HINCRBY', usage, tenant .. ' ' .. model .. ' ' .. name, amounts[i])
        end
    end
    redis.call('EXPIRE', usage, keep)
    if amounts[5] ~= 0 then
        for _, period in ipairs({day, day:sub(1, 7)}) do
            redis.call('HINCRBY', prefix .. 'spend:' .. period, tenant, amounts[5])
            redis.call('EXPIRE', prefix .. 'spend:' .. period, keep)
        end
    end
end

local function read(key)
    local window = {total = 0, amounts = {}}
    local found = redis.call('HGETALL', key)
    for i = 1, #found, 2 do
        local at, amount = tonumber(found[i]), tonumber(found[i + 1])
        if math.abs(second - at) > 60 then  -- also what was booked before the clock was set back
            redis.call('HDEL', key, found[i])
        else
            window.total = window.total + amount
            window.amounts[#window.amounts + 1] = {at, amount}
        end
    end
    table.sort(window.amounts, function(a, b) return a[1] < b[1] end)
    return window
end

local function wait(window, needed)
    for _, entry in ipairs(window.amounts) do
        needed = needed - entry[2]
        if needed <= 0 then return entry[1] + 61 - now end
    end
    return 61
end

local function reset(window)
    local newest = window.amounts[#window.amounts]
    return newest and newest[1] + 61 - now or 0
end

local function book(key, window, amount)
    if amount == 0 then return end
    redis.call('HINCRBY', key, second, amount)
    redis.call('EXPIRE', key, 120)
    window.total = window.total + amount
    window.amounts[#window.amounts + 1] = {second, amount}
end

local function spent(period, tenant, budget)
    return budget >= 0 and tonumber(redis.call('HGET', prefix .. 'spend:' .. period, tenant) or 0) or 0
end

-- What running requests may spend, by tenant: read once for all reservations of this trip.
local held_back = {}

local function reserved(tenant)
    if not held_back[tenant] then
        local key, sum = prefix .. 'reserved:' .. tenant, 0
        redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
            sum = sum + tonumber(member:match(' (%d+)$'))
        end
        held_back[tenant] = sum
    end
    return held_back[tenant]
end

local function hold(key, member)
    redis.call('ZADD', key, now + lease, member)
    redis.call('EXPIRE', key, lease * 2)
end

local function reserve(
    tenant, model, id, count, tokens, cost, day, max_requests, max_tokens, max_running, day_budget, month_budget
)
    local whose = tenant .. ':' .. model
    local requests_key, tokens_key = prefix .. 'requests:' .. whose, prefix .. 'tokens:' .. whose
    local leases = prefix .. 'leases:' .. whose
    local requests, used = read(requests_key), read(tokens_key)
    local today, month = spent(day, tenant, day_budget), spent(day:sub(1, 7), tenant, month_budget)
    local budgeted = day_budget >= 0 or month_budget >= 0
    local pending = budgeted and reserved(tenant) or 0
    local of_month, of_day = month_budget - month - pending, day_budget - today - pending
    redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
    local refusal, delay, left = 0, 0, 0
    if month_budget >= 0 and of_month < math.max(1, cost) then
        refusal, left = 5, of_month
    elseif day_budget >= 0 and of_day < math.max(1, cost) then
        refusal, left = 4, of_day
    elseif max_running >= 0 and redis.call('ZCARD', leases) >= max_running then
        refusal = 3
    elseif max_requests >= 0 and requests.total + 1 > max_requests then
        refusal, delay = 1, wait(requests, requests.total + 1 - max_requests)
    elseif max_tokens >= 0 and used.total + tokens > max_tokens then
        refusal, delay = 2, wait(used, used.total + tokens - max_tokens)
    else
        book(requests_key, requests, count)
        book(tokens_key, used, tokens)
        hold(leases, id)
        if budgeted and cost > 0 then
            hold(prefix .. 'reserved:' .. tenant, id .. ' ' .. string.format('%.0f', cost))
            held_back[tenant] = pending + cost
        end
    end
    return {
        refusal, math.ceil(delay * 1000),
        math.max(0, max_requests - requests.total), math.ceil(reset(requests) * 1000),
        math.max(0, max_tokens - used.total), math.ceil(reset(used) * 1000),
        second, left, today, month,
    }
end

-- A gateway that got no answer sends its settlements again, and a Redis that was frozen then runs both batches, in
-- either order. So each counts once, by its number.
if #settlements > 0 then
    local key = prefix .. 'settled:' .. gateway
    local done = tonumber(redis.call('GET', key) or 0)
    redis.call('SET', key, math.max(done, acknowledged + #settlements), 'EX', DAY)
    for i, settlement in ipairs(settlements) do
        if acknowledged + i > done then settle(unpack(settlement)) end
    end
end
local answers = {}
for i, reservation in ipairs(reservations) do
    answers[i] = reserve(unpack(reservation))
end
return answers
"""

# One tenant's documents of a kind: each under a key of its own, their names by age and their sizes beside them.
_DROP = """
local where = ARGV[1]
local names, sizes, total = where .. ' names', where .. ' sizes', where .. ' bytes'
local function drop(name)
    redis.call('DECRBY', total, redis.call('HGET', sizes, name) or 0)
    redis.call('HDEL', sizes, name)
    redis.call('ZREM', names, name)
    return redis.call('DEL', where .. ':' .. name)
end
"""
# ARGV: where, name, document, how many are kept, bytes, seconds, time (-1: the server's), and the document that must be
#   there now, if it matters. Returns whether it was kept.
SAVE = (
    _DROP
    + """
local name, document, count, bytes, seconds, now =
    ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if now < 0 then
    local time = redis.call('TIME')
    now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
if ARGV[8] and redis.call('GET', where .. ':' .. name) ~= ARGV[8] then
    return 0
end
drop(name)
redis.call('SET', where .. ':' .. name, document, 'PX', math.floor(seconds * 1000))
redis.call('ZADD', names, now, name)
redis.call('HSET', sizes, name, #document)
redis.call('INCRBY', total, #document)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', names, '-inf', now - seconds)) do
    drop(old)
end
while redis.call('ZCARD', names) > count or tonumber(redis.call('GET', total)) > bytes do
    drop(redis.call('ZRANGE', names, 0, 0)[1])
end
for _, key in ipairs({names, sizes, total}) do
    redis.call('PEXPIRE', key, math.floor(seconds * 1000))
end
return 1
"""
)
# ARGV: where, name.
DISCARD = _DROP + "return drop(ARGV[2])"
