/* Annealing over recompute events, compiled. lowtide/plan/recompute/annealing/kernel_python.py does exactly the same, slowly:
 * every change here needs the same change there, and tests/plan/test_anneal.py compares the two.
 *
 * A slot is a run: key = instant * n + operator. Slots lie in order in `key`, the bytes live during each in
 * `mem`. Inserting or removing a run changes the lives of what it writes and reads, nothing else. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
typedef uint64_t u64;

#define NEVER INT64_MAX
#define STACK 4096

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

typedef struct {
    i64 len, cap;
    i64 *at; /* instants, rising */
} runs_t;

typedef struct {
    /* the problem */
    i64 n, m, split;
    const i64 *time, *ws, *fixed, *again, *over, *rp, *rd, *wp, *wr, *bytes, *prod, *kept, *bk, *cp, *ch, *cb, *ck, *cw;
    i64 *up, *us; /* readers of each storage */
    i64 *cand, cands;
    /* the schedule */
    runs_t *runs;
    i64 *key, *mem, slots, cap;
    i64 *ev, evs, evcap;
    i64 *cnt, copied;
    i64 cost, excess, budget;
    /* the move */
    i64 *log, logs, logcap;
    i64 *mark, stamp;
    i64 stack[STACK];
    u64 rng;
    int failed;
} S;

static u64 draw(S *z) {
    u64 x = (z->rng += 0x9E3779B97F4A7C15ULL);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return (x ^ (x >> 31)) >> 11;
}
static i64 below(S *z, i64 k) { return (i64)(draw(z) % (u64)k); }

static i64 place(const S *z, i64 k) { /* first slot with a key not below k */
    i64 lo = 0, hi = z->slots;
    while (lo < hi) {
        i64 mid = (lo + hi) >> 1;
        if (z->key[mid] < k) lo = mid + 1; else hi = mid;
    }
    return lo;
}

VECTORS static i64 shift_all(i64 *mem, i64 count, i64 d, i64 budget) {
    i64 change = 0;
    for (i64 i = 0; i < count; i++) {
        i64 before = mem[i] - budget, after = before + d;
        mem[i] += d;
        change += (after > 0 ? after : 0) - (before > 0 ? before : 0);
    }
    return change;
}
static void add(S *z, i64 from, i64 to, i64 d) { /* slots from <= i < to */
    if (from < to) z->excess += shift_all(z->mem + from, to - from, d, z->budget);
}

static i64 prev_run(const S *z, i64 v, i64 k) { /* key of the last run of v before k, or -1 */
    const runs_t *r = &z->runs[v];
    for (i64 i = r->len; i-- > 0;) {
        i64 x = r->at[i] * z->n + v;
        if (x < k) return x;
    }
    return -1;
}
static i64 next_run(const S *z, i64 v, i64 k) { /* key of the first run of v after k, or NEVER */
    const runs_t *r = &z->runs[v];
    i64 found = NEVER;
    for (i64 i = r->len; i-- > 0;) {
        i64 x = r->at[i] * z->n + v;
        if (x <= k) break;
        found = x;
    }
    return found;
}
static i64 last_use(const S *z, i64 s, i64 a, i64 b) { /* last reader's run in (a, b), or a */
    i64 found = a;
    for (i64 i = z->up[s]; i < z->up[s + 1]; i++) {
        i64 x = prev_run(z, z->us[i], b);
        if (x > found) found = x;
    }
    return found;
}
static i64 first_use(const S *z, i64 s, i64 k) { /* first reader's run after k */
    i64 found = NEVER;
    for (i64 i = z->up[s]; i < z->up[s + 1]; i++) {
        i64 x = next_run(z, z->us[i], k);
        if (x < found) found = x;
    }
    return found;
}
/* key of the run that made what is there of a storage before k, or -1; a fetch from the host makes it too */
static i64 born(const S *z, i64 s, i64 k) {
    i64 a = z->prod[s] < 0 ? -1 : prev_run(z, z->prod[s], k), back = z->bk[s] * (z->n + 1);
    return z->bk[s] >= 0 && back < k && back > a ? back : a;
}
static i64 reborn(const S *z, i64 s, i64 k) { /* key of the run that makes it anew after k */
    i64 b = z->prod[s] < 0 ? NEVER : next_run(z, z->prod[s], k), back = z->bk[s] * (z->n + 1);
    return z->bk[s] >= 0 && back > k && back < b ? back : b;
}

/* whether the run at e takes over the storage s, born at a, which dies there */
static int takes(const S *z, i64 s, i64 a, i64 e) {
    i64 w = e % z->n;
    return e > a && z->over[w] == s && (e / z->n == w || !z->kept[z->wr[z->wp[w]]]);
}
static void taking(S *z, i64 s, i64 a, i64 e, i64 sign) {
    if (e > a && e >= 0 && takes(z, s, a, e)) {
        i64 i = place(z, e);
        add(z, i, i + 1, -sign * z->bytes[s]);
    }
}

static i64 passing(const S *z, i64 at) { /* bytes that are gone right after a slot */
    i64 x = z->key[at], v = x % z->n, gone = z->ws[v];
    for (i64 i = z->rp[v]; i < z->rp[v + 1]; i++) {
        i64 u = z->rd[i];
        if (z->kept[u]) continue;
        i64 a = born(z, u, x);
        if (last_use(z, u, a, reborn(z, u, x)) == x) {
            gone += z->bytes[u];
            if (takes(z, u, a, x)) gone -= z->bytes[u];
        }
    }
    for (i64 i = z->wp[v]; i < z->wp[v + 1]; i++) {
        i64 s = z->wr[i];
        if (z->kept[s]) {
            if (x / z->n != v) gone += z->bytes[s];
        } else if (last_use(z, s, x, reborn(z, s, x)) == x)
            gone += z->bytes[s];
    }
    return gone;
}

static int grow(i64 **what, i64 *cap, i64 need) {
    if (need <= *cap) return 1;
    i64 more = *cap * 2 > need ? *cap * 2 : need + 16;
    i64 *got = realloc(*what, (size_t)more * sizeof(i64));
    if (!got) return 0;
    *what = got;
    *cap = more;
    return 1;
}

static void charge(S *z, i64 t, i64 v, i64 sign) {
    for (i64 i = z->cp[v]; i < z->cp[v + 1]; i++) {
        i64 c = z->ch[i];
        if (t < z->cw[c]) continue;
        int changes = sign > 0 ? z->cnt[c]++ == 0 : --z->cnt[c] == 0;
        if (!changes) continue;
        add(z, place(z, z->ck[c]), z->slots, sign * z->cb[c]);
        if (z->ck[c] == z->split * z->n) z->copied += sign * z->cb[c];
    }
}

static int raw_insert(S *z, i64 t, i64 v) {
    i64 n = z->n, x = t * n + v, at = place(z, x);
    runs_t *r = &z->runs[v];
    if (z->slots + 1 > z->cap) {
        i64 cap = z->cap;
        if (!grow(&z->key, &cap, z->slots + 1)) return 0;
        if (!grow(&z->mem, &z->cap, z->slots + 1)) return 0;
    }
    if (!grow(&r->at, &r->cap, r->len + 1) || !grow(&z->ev, &z->evcap, z->evs + 1)) return 0;
    i64 before = z->key[at - 1] / n, live = z->mem[at - 1] - passing(z, at - 1) + z->fixed[t] - z->fixed[before];
    if (t == z->split && before < t) live += z->copied;
    live += z->ws[v];
    memmove(z->key + at + 1, z->key + at, (size_t)(z->slots - at) * sizeof(i64));
    memmove(z->mem + at + 1, z->mem + at, (size_t)(z->slots - at) * sizeof(i64));
    z->slots++;
    z->key[at] = x;
    z->mem[at] = live;
    if (live > z->budget) z->excess += live - z->budget;
    for (i64 i = z->rp[v]; i < z->rp[v + 1]; i++) {
        i64 u = z->rd[i];
        if (z->kept[u]) continue;
        i64 a = born(z, u, x), e = last_use(z, u, a, reborn(z, u, x));
        if (e < x) {
            taking(z, u, a, e, -1);
            add(z, e < 0 ? 0 : place(z, e + 1), at + 1, z->bytes[u]);
            taking(z, u, a, x, 1);
        }
    }
    for (i64 i = z->wp[v]; i < z->wp[v + 1]; i++) {
        i64 s = z->wr[i];
        if (z->kept[s]) {
            add(z, at, at + 1, z->bytes[s]);
            continue;
        }
        i64 a = born(z, s, x), e = last_use(z, s, a, reborn(z, s, x));
        if (e > x) {
            i64 e1 = last_use(z, s, a, x);
            add(z, place(z, e1 + 1), at, -z->bytes[s]);
            taking(z, s, a, e1, 1);
        } else
            add(z, at, at + 1, z->bytes[s]);
    }
    i64 i = r->len++;
    for (; i > 0 && r->at[i - 1] > t; i--) r->at[i] = r->at[i - 1];
    r->at[i] = t;
    charge(z, t, v, 1);
    z->ev[z->evs++] = x;
    z->cost += z->time[v];
    return 1;
}

static void raw_remove(S *z, i64 t, i64 v) {
    i64 n = z->n, x = t * n + v, at = place(z, x), i;
    runs_t *r = &z->runs[v];
    charge(z, t, v, -1);
    for (i = 0; r->at[i] != t; i++) {}
    memmove(r->at + i, r->at + i + 1, (size_t)(r->len - i - 1) * sizeof(i64));
    r->len--;
    for (i = z->rp[v]; i < z->rp[v + 1]; i++) {
        i64 u = z->rd[i];
        if (z->kept[u]) continue;
        i64 a = born(z, u, x), e = last_use(z, u, a, reborn(z, u, x));
        if (e < x) {
            add(z, e < 0 ? 0 : place(z, e + 1), at + 1, -z->bytes[u]);
            taking(z, u, a, e, 1);
        }
    }
    for (i = z->wp[v]; i < z->wp[v + 1]; i++) {
        i64 s = z->wr[i];
        if (z->kept[s]) continue;
        i64 a = born(z, s, x), e = last_use(z, s, a, reborn(z, s, x));
        if (e > x) {
            i64 e1 = last_use(z, s, a, x);
            taking(z, s, a, e1, -1);
            add(z, place(z, e1 + 1), at, z->bytes[s]);
        }
    }
    if (z->mem[at] > z->budget) z->excess -= z->mem[at] - z->budget;
    z->slots--;
    memmove(z->key + at, z->key + at + 1, (size_t)(z->slots - at) * sizeof(i64));
    memmove(z->mem + at, z->mem + at + 1, (size_t)(z->slots - at) * sizeof(i64));
    for (i = 0; z->ev[i] != x; i++) {}
    z->ev[i] = z->ev[--z->evs];
    z->cost -= z->time[v];
}

static int has(const S *z, i64 t, i64 v) {
    const runs_t *r = &z->runs[v];
    for (i64 i = r->len; i-- > 0;)
        if (r->at[i] == t) return 1;
    return 0;
}
static int note(S *z, i64 x, i64 kind) {
    if (!grow(&z->log, &z->logcap, z->logs + 1)) return 0;
    z->log[z->logs++] = x * 2 + kind;
    return 1;
}
static int useless(const S *z, i64 x) { /* an event whose results nobody reads before they are made anew */
    i64 v = x % z->n;
    if (x / z->n == v) return 0;
    for (i64 i = z->wp[v]; i < z->wp[v + 1]; i++) {
        i64 s = z->wr[i];
        if (!z->kept[s] && last_use(z, s, x, reborn(z, s, x)) > x) return 0;
    }
    return 1;
}
static void drop(S *z, i64 x) { /* remove an event, and those that only it needed */
    i64 top = 0;
    z->stack[top++] = x;
    while (top > 0) {
        i64 y = z->stack[--top], v = y % z->n;
        if (!has(z, y / z->n, v)) continue;
        raw_remove(z, y / z->n, v);
        if (!note(z, y, 0)) z->failed = 1;
        for (i64 i = z->rp[v]; i < z->rp[v + 1]; i++) {
            i64 u = z->rd[i];
            if (z->kept[u] || z->prod[u] < 0) continue;
            i64 a = born(z, u, y);
            if (useless(z, a) && top < STACK) z->stack[top++] = a;
        }
    }
}
static void undo(S *z) {
    while (z->logs > 0) {
        i64 entry = z->log[--z->logs], x = entry >> 1;
        if (entry & 1) raw_remove(z, x / z->n, x % z->n);
        else if (!raw_insert(z, x / z->n, x % z->n)) z->failed = 1;
    }
}

/* run v again at t, with those of its ancestors that would otherwise be held over the slot with key k */
static void remake(S *z, i64 t, i64 v, i64 k, i64 odds) {
    i64 found = 0, next = 0;
    z->stamp++;
    z->stack[found++] = v;
    z->mark[v] = z->stamp;
    while (next < found) {
        i64 w = z->stack[next++], x = t * z->n + w;
        for (i64 i = z->rp[w]; i < z->rp[w + 1]; i++) {
            i64 u = z->rd[i], p = z->prod[u];
            if (p < 0 || z->kept[u] || !z->again[p] || z->mark[p] == z->stamp || has(z, t, p)) continue;
            i64 a = born(z, u, x);
            if (a > k || last_use(z, u, a, reborn(z, u, x)) >= k) continue;
            if (found >= STACK / 2 || below(z, 16) >= odds) continue;
            z->mark[p] = z->stamp;
            z->stack[found++] = p;
        }
    }
    /* put() may use the stack: keep the list apart */
    i64 *list = malloc((size_t)found * sizeof(i64));
    if (!list) {
        z->failed = 1;
        return;
    }
    memcpy(list, z->stack, (size_t)found * sizeof(i64));
    for (i64 i = found; i-- > 0;) {
        if (has(z, t, list[i])) continue;
        if (!raw_insert(z, t, list[i]) || !note(z, t * z->n + list[i], 1)) z->failed = 1;
    }
    for (i64 i = found; i-- > 0;) {
        i64 a = prev_run(z, list[i], t * z->n + list[i]);
        if (a >= 0 && useless(z, a)) drop(z, a);
    }
    free(list);
}

/* let go of some storage that is held over a slot, and make it again for its next use */
static int evict(S *z, i64 at) {
    i64 k = z->key[at], w = k % z->n;
    for (int tries = 0; tries < 16; tries++) {
        i64 s = z->cand[below(z, z->cands)];
        if (tries & 1) {
            i64 other = z->cand[below(z, z->cands)];
            if (z->bytes[other] > z->bytes[s]) s = other;
        }
        i64 v = z->prod[s], a = born(z, s, k);
        if (a < 0 || v == w || z->bk[s] == w) continue;
        i64 e = last_use(z, s, a, reborn(z, s, k));
        if (e <= k) continue;
        i64 reads = 0;
        for (i64 i = z->rp[w]; i < z->rp[w + 1]; i++) reads |= z->rd[i] == s;
        if (reads) continue;
        i64 t = first_use(z, s, k) / z->n;
        if (t * z->n + v <= k) continue;
        remake(z, t, v, k, below(z, 4) ? 14 : 16);
        return 1;
    }
    return 0;
}

static i64 worst(const S *z, i64 from, i64 to) {
    i64 best = from;
    for (i64 i = from; i < to; i++)
        if (z->mem[i] > z->mem[best]) best = i;
    return best;
}

static int shift(S *z) {
    i64 x = z->ev[below(z, z->evs)], t = x / z->n, v = x % z->n;
    i64 first = NEVER;
    for (i64 i = z->wp[v]; i < z->wp[v + 1]; i++) {
        i64 s = z->wr[i];
        if (z->kept[s]) continue;
        i64 use = first_use(z, s, x);
        if (use < first) first = use;
    }
    i64 low = prev_run(z, v, x) / z->n + 1, high = first == NEVER ? t : first / z->n;
    if (high <= low) return 0;
    i64 to = low + below(z, high - low + 1);
    if (below(z, 2)) { /* nearby */
        i64 step = below(z, 4) + 1;
        to = below(z, 2) ? t + step : t - step;
        if (to < low || to > high) return 0;
    }
    if (to == t || has(z, to, v)) return 0;
    if (!raw_insert(z, to, v) || !note(z, to * z->n + v, 1)) z->failed = 1;
    drop(z, x);
    if (has(z, to, v) && useless(z, to * z->n + v)) drop(z, to * z->n + v);
    return 1;
}

/* give up an event, then let go of other storages where memory is short for it */
static int swap(S *z) {
    i64 x = z->ev[below(z, z->evs)], v = x % z->n, a = prev_run(z, v, x);
    drop(z, x);
    i64 rounds = 1 + below(z, 3);
    for (i64 i = 0; i < rounds && z->excess > 0; i++) {
        i64 from = place(z, a), to = place(z, x);
        i64 at = worst(z, from, to > from ? to : from + 1);
        if (z->mem[at] <= z->budget) at = below(z, z->slots);
        evict(z, at);
    }
    return 1;
}

static int move(S *z) {
    i64 dice = below(z, 100);
    if (z->evs == 0 || dice < (z->excess > 0 ? 55 : 20)) {
        i64 at = below(z, z->slots);
        if (z->excess > 0)
            for (int tries = 0; tries < 24 && z->mem[at] <= z->budget; tries++) at = below(z, z->slots);
        return evict(z, at);
    }
    if (dice < 65) return shift(z);
    if (dice < 80) {
        drop(z, z->ev[below(z, z->evs)]);
        return 1;
    }
    if (dice < 95) return swap(z);
    i64 x = z->ev[below(z, z->evs)];
    remake(z, x / z->n, x % z->n, x - x % z->n, 8);
    return z->logs > 0;
}

static void release(S *z) {
    if (z->runs)
        for (i64 v = 0; v < z->n; v++) free(z->runs[v].at);
    free(z->runs); free(z->up); free(z->us); free(z->cand); free(z->key); free(z->mem); free(z->ev);
    free(z->cnt); free(z->log); free(z->mark);
    free(z);
}

static int prepare(S *z, const i64 *p, i64 size) {
    i64 n = z->n = p[0], m = z->m = p[1], reads = p[2], writes = p[3], charges = p[4], charged = p[5];
    z->split = p[6];
    if (size != 7 + 5 * n + 3 * (n + 1) + reads + writes + charged + 4 * m + 3 * charges) return -1;
    p += 7;
#define TAKE(field, count) z->field = p; p += (count)
    TAKE(time, n); TAKE(ws, n); TAKE(fixed, n); TAKE(again, n); TAKE(over, n);
    TAKE(rp, n + 1); TAKE(rd, reads); TAKE(wp, n + 1); TAKE(wr, writes);
    TAKE(bytes, m); TAKE(prod, m); TAKE(kept, m); TAKE(bk, m);
    TAKE(cp, n + 1); TAKE(ch, charged); TAKE(cb, charges); TAKE(ck, charges); TAKE(cw, charges);
    z->runs = calloc((size_t)n, sizeof(runs_t));
    z->up = calloc((size_t)m + 2, sizeof(i64));
    z->us = malloc((size_t)(reads + 1) * sizeof(i64));
    z->cand = malloc((size_t)(m + 1) * sizeof(i64));
    z->mark = calloc((size_t)n + 1, sizeof(i64));
    z->cnt = calloc((size_t)charges + 1, sizeof(i64));
    i64 cap = 0;
    if (!z->runs || !z->up || !z->us || !z->cand || !z->mark || !z->cnt) return 0;
    if (!grow(&z->key, &cap, n + 256) || !grow(&z->mem, &z->cap, n + 256)) return 0;
    for (i64 i = 0; i < reads; i++) z->up[z->rd[i] + 2]++;
    for (i64 s = 0; s < m; s++) z->up[s + 2] += z->up[s + 1];
    for (i64 v = 0; v < n; v++)
        for (i64 i = z->rp[v]; i < z->rp[v + 1]; i++) z->us[z->up[z->rd[i] + 1]++] = v;
    for (i64 s = 0; s < m; s++)
        if (z->prod[s] >= 0 && !z->kept[s] && z->again[z->prod[s]] && z->bytes[s] > 0 && z->up[s + 1] > z->up[s])
            z->cand[z->cands++] = s;
    for (i64 v = 0; v < n; v++) {
        if (!grow(&z->runs[v].at, &z->runs[v].cap, 2)) return 0;
        z->runs[v].at[0] = v;
        z->runs[v].len = 1;
        z->key[v] = v * n + v;
        z->mem[v] = z->fixed[v] + z->ws[v];
    }
    z->slots = n;
    for (i64 s = 0; s < m; s++) {
        i64 back = z->bk[s] < 0 ? NEVER : z->bk[s] * n + z->bk[s];
        i64 a = z->prod[s] < 0 ? -1 : z->prod[s] * n + z->prod[s];
        for (i64 life = 0; life < (z->bk[s] < 0 ? 1 : 2); life++) {
            if (life) a = back;
            i64 e = z->kept[s] ? n * n : last_use(z, s, a, life ? NEVER : back);
            for (i64 v = a < 0 ? 0 : a / n; v < n && v * n + v <= e; v++) z->mem[v] += z->bytes[s];
            if (!z->kept[s] && e >= 0 && takes(z, s, a, e)) z->mem[e / n] -= z->bytes[s];
        }
    }
    for (i64 v = 0; v < n; v++)
        if (z->mem[v] > z->budget) z->excess += z->mem[v] - z->budget;
    return 1;
}

static i64 penalty(const S *z, i64 lam, i64 sh) {
    return z->excess > 0 ? ((((z->excess - 1) >> sh) + 1) * lam) >> 16 : 0;
}

/* settings: budget, moves, seed, lambda, shift, known, temperatures (64), logarithms (1024) */
static int search(S *z, const i64 *set, i64 *out, i64 **best, i64 *bests) {
    i64 moves = set[1], lam = set[3], sh = set[4], known = set[5];
    const i64 *temps = set + 6, *logs = set + 70;
    i64 bestcap = 0, accepted = 0;
    *bests = -1;
    if (z->excess == 0 && z->cost < known) {
        if (!grow(best, &bestcap, z->evs + 1)) return 0;
        memcpy(*best, z->ev, (size_t)z->evs * sizeof(i64));
        *bests = z->evs;
        known = z->cost;
    }
    i64 least = z->excess;
    for (i64 done = 0; done < moves && z->cands > 0 && known > 0; done++) {
        i64 heat = temps[done * 64 / moves];
        i64 was = z->cost + penalty(z, lam, sh);
        z->logs = 0;
        int changed = move(z);
        i64 luck = (heat * logs[below(z, 1024)]) >> 16;
        if (z->failed) return 0;
        if (changed && z->cost + penalty(z, lam, sh) - was <= luck) {
            accepted++;
            if (z->excess < least) least = z->excess;
            if (z->excess == 0 && z->cost < known) {
                if (!grow(best, &bestcap, z->evs + 1)) return 0;
                memcpy(*best, z->ev, (size_t)z->evs * sizeof(i64));
                *bests = z->evs;
                known = z->cost;
            }
        } else
            undo(z);
        if ((done & 127) == 127) {
            if (z->excess > 0) lam += (lam >> 4) + 1; else lam -= lam >> 5;
            if (lam > ((i64)1 << 36)) lam = (i64)1 << 36;
            if (lam < 16) lam = 16;
        }
    }
    out[0] = known; out[1] = z->cost; out[2] = z->excess; out[3] = lam; out[4] = accepted; out[5] = least;
    return !z->failed;
}

static PyObject *anneal(PyObject *self, PyObject *args) {
    const char *problem, *start, *settings;
    Py_ssize_t np, ns, nt;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#y#y#", &problem, &np, &start, &ns, &settings, &nt)) return NULL;
    if (np < 56 || nt != (6 + 64 + 1024) * 8) {
        PyErr_SetString(PyExc_ValueError, "a packed problem, events and 1094 settings are expected");
        return NULL;
    }
    S *z = calloc(1, sizeof(S));
    if (!z) return PyErr_NoMemory();
    i64 out[6] = {0}, *best = NULL, bests = -1;
    int good;
    const i64 *set = (const i64 *)settings, *ev = (const i64 *)start;
    Py_BEGIN_ALLOW_THREADS
    z->budget = set[0];
    z->rng = (u64)set[2];
    good = prepare(z, (const i64 *)problem, (i64)(np / 8));
    if (good > 0) {
        for (i64 i = 0; good > 0 && i < (i64)(ns / 8); i++) {
            i64 t = ev[i] / z->n, v = ev[i] % z->n;
            if (t >= z->n || v >= t || !z->again[v]) good = -1;
            else if (!has(z, t, v) && !raw_insert(z, t, v)) good = 0;
        }
        for (i64 again = 1; good > 0 && again;) {
            again = 0;
            for (i64 i = z->evs; i-- > 0;)
                if (i < z->evs && useless(z, z->ev[i])) {
                    drop(z, z->ev[i]);
                    again = 1;
                }
        }
        if (good > 0) good = search(z, set, out, &best, &bests);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (good > 0) {
        PyObject *first = bests < 0 ? (Py_INCREF(Py_None), Py_None)
                                    : PyBytes_FromStringAndSize((char *)best, (Py_ssize_t)bests * 8);
        PyObject *second = PyBytes_FromStringAndSize((char *)z->ev, (Py_ssize_t)z->evs * 8);
        PyObject *third = PyBytes_FromStringAndSize((char *)out, sizeof(out));
        if (first && second && third) result = PyTuple_Pack(3, first, second, third);
        Py_XDECREF(first); Py_XDECREF(second); Py_XDECREF(third);
    } else if (good < 0)
        PyErr_SetString(PyExc_ValueError, "the packed problem or its events contradict themselves");
    else
        PyErr_NoMemory();
    free(best);
    release(z);
    return result;
}

static PyMethodDef methods[] = {
    {"anneal", anneal, METH_VARARGS, "anneal(problem, events, settings) -> (best, current, figures)"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_anneal", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__anneal(void) { return PyModule_Create(&definition); }
