/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Schedules of puts, durable puts, finds, drops, evictions and loads, in the middle of
 * which the power is lost, several times in a row. After each loss a new store opens what
 * the disk has kept, and is judged by what the old one has told:
 *
 *   - whatever a load calls whole has the bytes of its kind and id;
 *   - a part that was told to last is found, and is whole, unless it was dropped or has
 *     left the files for others since;
 *   - a chunk that was dropped, and whose header was erased and synced, does not come
 *     back, unless another copy of it had been left in a slot that was given back before:
 *     what leaves the files for others is not erased;
 *   - whoever waits is told.
 *
 * A schedule follows from its seed, which is printed when it fails. KVD_FILES_SEED=n
 * plays that one alone, KVD_FILES_SCHEDULES=n so many.
 */
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/lib/files_world.h"
#include "tests/lib/sweep.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCHEDULES 3000u
#else
#define SCHEDULES 60000u
#endif
#define IDS 6u
#define HALVES 2u
#define DROPS_SEEN 4u

/* Of a part, as far as a store has told. */
struct known {
	bool lasts;	      /* it was told to last, and not to leave since */
	bool gone;	      /* it was dropped, and does not come back */
	bool stale;	      /* a slot that is nobody's may have a copy */
	bool placed;	      /* has a place */
	unsigned int version; /* puts */
};

struct drop {
	struct store_chunk *chunk; /* pinned; NULL: none */
	unsigned int versions[FW_KINDS];
	uint32_t id;
};

struct play {
	struct files_world w;
	uint64_t seed, random;
	struct known known[FW_KINDS][IDS];
	struct store_part *halves[HALVES]; /* being filled */
	struct drop drops[DROPS_SEEN];
	uint64_t evicted; /* of files, when it was looked at last */
	uint64_t struck;  /* by faults, when this life began */
	bool faults, lost_power, watched;
};

static uint64_t playing; /* the seed; 0: none */
static uint64_t tally[8];
enum { TOLD, JUDGED, BAD, ERASED, LOST, EVICTED, LIVES, FAULTED };

static uint64_t draw(struct play *p, uint64_t n)
{
	p->random ^= p->random << 13;
	p->random ^= p->random >> 7;
	p->random ^= p->random << 17;
	return (p->random * UINT64_C(0x2545f4914f6cdd1d) >> 20) % n;
}

static void note(const char *what, enum fw_kind kind, uint32_t id)
{
	if (log_threshold >= LOG_LEVEL_DEBUG)
		fprintf(stderr, "%s kind %u id %u\n", what, kind, id);
}

/* ---- what a store tells ---- */

static uint64_t files_evicted(const struct play *p)
{
	struct arena_figures figures;

	arena_figures(p->w.store->file_arena, &figures);
	return figures.evicted;
}

/* The part that was to last is not there any more, and nobody took it away. */
static void look_at_part(struct play *p, enum fw_kind kind, uint32_t id,
			 const struct store_part *part, unsigned int *left)
{
	struct known *known = &p->known[kind][id];
	bool placed = part && part->place.slab;

	if (part && known->gone)
		fail_msg("kind %u id %u: it was dropped, and comes back", kind, id);
	if (known->placed && !placed)
		known->stale = true;
	known->placed = placed;
	if (known->lasts && p->w.store->files->scanned &&
	    !(part && part->file != PART_UNFILED)) {
		note("left", kind, id);
		known->lasts = false;
		left[kind == KIND_A_RANK ? KIND_A : kind] |= 1u << id;
	}
	if (part && part->file == PART_LASTS) {
		if (!known->lasts)
			note("lasts", kind, id);
		tally[TOLD] += !known->lasts;
		known->lasts = true;
	}
}

/* An older one of the same id is not over. */
static bool drop_before(const struct play *p, const struct store_chunk *chunk)
{
	for (unsigned int i = 0; i < DROPS_SEEN; i++) {
		const struct store_chunk *other = p->drops[i].chunk;

		if (other && other->space == chunk->space && other->first == chunk->first)
			return true;
	}
	return false;
}

static void drop_over(struct play *p, struct drop *drop)
{
	struct store_chunk *chunk = mem_steal(drop->chunk);
	const struct store_part *part;
	bool before = drop_before(p, chunk);

	list_foreach(part, &chunk->parts, link) {
		enum fw_kind kind = fw_kind_of(part->class);
		struct known *known = &p->known[kind][drop->id];

		if (part->file != PART_UNFILED || disk_sim_struck(p->w.sim) != p->struck)
			known->stale = true; /* perhaps it was not erased */
		if (before || known->stale || known->version != drop->versions[kind])
			continue;
		known->gone = true;
		tally[ERASED]++;
	}
	store_chunk_unpin(chunk);
}

static void look_at_drops(struct play *p)
{
	for (unsigned int i = 0; i < DROPS_SEEN; i++) {
		const struct store_part *part;
		bool busy = false;

		if (!p->drops[i].chunk)
			continue;
		list_foreach(part, &p->drops[i].chunk->parts, link)
			busy |= part->job != NULL;
		if (!busy)
			drop_over(p, &p->drops[i]);
	}
}

static void look(struct play *p)
{
	const struct store_part *parts[FW_KINDS][IDS] = {0};
	unsigned int left[FW_KINDS] = {0}, count = 0;
	uint64_t evicted = files_evicted(p);
	struct store *store = p->w.store;
	struct fw_move *move;

	for (uint64_t i = 0; i <= store->bucket_mask; i++) {
		for (struct store_chunk *c = store->buckets[i]; c; c = c->next) {
			const struct store_part *part;

			list_foreach(part, &c->parts, link)
				parts[fw_kind_of(part->class)][fw_id_of(c)] = part;
		}
	}
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < IDS; id++)
			look_at_part(p, kind, id, parts[kind][id], left);
		count += (unsigned int)__builtin_popcount(left[kind]);
	}
	if (count > evicted - p->evicted)
		fail_msg("%u chunks that were told to last have left, of %ju evicted",
			 count, (uintmax_t)(evicted - p->evicted));
	tally[EVICTED] += evicted - p->evicted;
	p->evicted = evicted;
	look_at_drops(p);
	list_foreach_safe(move, &p->w.moves, link) {
		if (move->state != MOVE_WAITS)
			fw_move_end(move);
	}
}

/* ---- what is done to it ---- */

static void do_put(struct play *p, enum fw_kind kind, uint32_t id, bool durable)
{
	struct store_part *part, **half = &p->halves[draw(p, HALVES)];
	int r = fw_put_begin(&p->w, kind, id, &part);

	if (r < 0)
		err_clear();
	note(durable ? "put durable" : "put", kind, id);
	if (r == 0) {
		p->known[kind][id].version++;
		p->known[kind][id].gone = false;
		if (*half || draw(p, 4))
			fw_put_end(part);
		else
			*half = part;
	}
	if (r >= 0 && durable)
		fw_durable(&p->w, kind, id);
}

static void do_fill(struct play *p)
{
	for (unsigned int i = 0; i < HALVES; i++) {
		struct store_part *part = mem_steal(p->halves[i]);

		if (!part)
			continue;
		if (draw(p, 3))
			fw_put_end(part);
		else
			fw_put_fail(part);
	}
}

/* Of what was not read yet a drop knows nothing. */
static void do_drop(struct play *p, enum fw_kind kind, uint32_t id)
{
	struct store_chunk *chunk = fw_chunk(&p->w, kind, id);
	struct drop *drop = &p->drops[draw(p, DROPS_SEEN)];
	const struct store_part *part;
	bool seen = chunk && !drop->chunk && p->w.store->files->scanned;

	if (!chunk)
		return;
	note("drop", kind, id);
	if (seen) {
		store_chunk_pin(chunk);
		*drop = (struct drop){.chunk = chunk, .id = id};
	}
	list_foreach(part, &chunk->parts, link) {
		enum fw_kind of = fw_kind_of(part->class);
		struct known *known = &p->known[of][id];

		known->lasts = known->placed = false;
		known->stale |= !seen;
		if (seen)
			drop->versions[of] = known->version;
	}
	assert_int_equal(fw_drop(&p->w, kind, id), 1);
}

/* Its files' copy is left where it is. */
static void do_unfile(struct play *p, enum fw_kind kind, uint32_t id)
{
	enum fw_kind first = kind == KIND_A_RANK ? KIND_A : kind;
	enum fw_kind last = first == KIND_A ? KIND_A_RANK : kind;

	if (!fw_unfile(&p->w, kind, id))
		return;
	note("unfile", kind, id);
	for (kind = first; kind <= last; kind++)
		p->known[kind][id].lasts = false;
}

static void do_fault(struct play *p)
{
	static const enum disk_what whats[] = {DISK_WRITE, DISK_SYNC, DISK_MAKE,
					       DISK_REMOVE, DISK_NAMED_WRITE};
	static const struct disk_sim_fault pieces = {
		.trouble = DISK_SIM_SHORT, .what = DISK_WRITE, .one_in = 2};
	const struct disk_sim_fault fault = {.trouble = draw(p, 4) ? DISK_SIM_EIO
								   : DISK_SIM_FULL,
					     .what = whats[draw(p, ARRAY_LEN(whats))],
					     .skip = draw(p, 3),
					     .count = 1 + draw(p, 2)};

	if (!p->faults || !p->w.store->files->scanned)
		return;
	disk_sim_heal(p->w.sim);
	if (draw(p, 2))
		disk_sim_fault(p->w.sim, &pieces);
	disk_sim_fault(p->w.sim, &fault);
	p->faults = draw(p, 2);
	tally[FAULTED]++;
}

static void do_step(struct play *p)
{
	enum fw_kind kind = (enum fw_kind)draw(p, FW_KINDS);
	uint32_t id = (uint32_t)draw(p, IDS);

	switch (draw(p, 24)) {
	case 0:
	case 1:
		do_put(p, kind, id, false);
		break;
	case 2:
	case 3:
	case 4:
		do_put(p, kind, id, true);
		break;
	case 5:
	case 6:
		fw_find(&p->w, kind, id);
		break;
	case 7:
		do_drop(p, kind, id);
		break;
	case 8:
		fw_forget(&p->w, kind, id);
		break;
	case 9:
		do_unfile(p, kind, id);
		break;
	case 10:
	case 11:
		note("fetch", kind, id);
		fw_fetch(&p->w, kind, id);
		break;
	case 12:
		do_fill(p);
		break;
	case 13:
		do_fault(p);
		break;
	default:
		fw_turn(&p->w);
		break;
	}
	look(p);
}

/* ---- the judge ---- */

static void settle(struct play *p)
{
	do_fill(p);
	fw_quiet(&p->w);
	for (unsigned int i = 0; i < 4; i++)
		fw_turn(&p->w);
	look(p);
	if (!list_empty(&p->w.moves))
		fail_msg("a move waits, and nothing is under way");
}

/* All that is there is read, and nothing is held meanwhile. */
static void judge(struct play *p)
{
	settle(p);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < IDS; id++) {
			bool lasts = p->known[kind][id].lasts;
			enum fw_state state;

			if (!fw_part(&p->w, kind, id))
				continue;
			note("judge", kind, id);
			state = fw_loads(&p->w, kind, id);
			if (state != MOVE_GOOD && (lasts || !p->lost_power))
				fail_msg("kind %u id %u: it is not whole", kind, id);
			tally[JUDGED] += state == MOVE_GOOD;
			tally[BAD] += state != MOVE_GOOD;
			look(p);
		}
	}
}

/* ---- lives ---- */

static void start(struct play *p)
{
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < IDS; id++)
			p->known[kind][id].placed = false;
	}
	p->evicted = 0;
	p->struck = disk_sim_struck(p->w.sim);
	note("start", 0, 0);
	fw_start(&p->w);
	tally[LIVES]++;
}

/* Everything of the daemon's memory is gone; what was under way may be there or not. */
static void end(struct play *p, bool power)
{
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < IDS; id++) {
			const struct store_part *part = fw_part(&p->w, kind, id);

			/* it may be written without that the store knew */
			if (part && part->job)
				p->known[kind][id].stale = true;
		}
	}
	note(power ? "loss of power" : "close", 0, 0);
	if (power)
		disk_sim_power_loss(p->w.sim);
	disk_sim_heal(p->w.sim);
	for (unsigned int i = 0; i < HALVES; i++) {
		if (p->halves[i])
			fw_put_fail(mem_steal(p->halves[i]));
	}
	for (unsigned int i = 0; i < DROPS_SEEN; i++) {
		struct store_chunk *chunk = mem_steal(p->drops[i].chunk);
		const struct store_part *part;

		if (!chunk)
			continue;
		list_foreach(part, &chunk->parts, link)
			p->known[fw_kind_of(part->class)][p->drops[i].id].stale = true;
		store_chunk_unpin(chunk);
	}
	fw_stop(&p->w);
	p->lost_power |= power;
	tally[LOST] += power;
}

static void live(struct play *p)
{
	uint64_t steps = 10 + draw(p, 60);
	bool early = draw(p, 2);

	start(p);
	if (!early) {
		fw_scanned(&p->w);
		look(p);
		if (draw(p, 2))
			judge(p);
	}
	for (uint64_t i = 0; i < steps; i++)
		do_step(p);
	/* what a failed sync has lost is seen by a start behind a loss of power alone */
	end(p, draw(p, 6) != 0 || disk_sim_struck(p->w.sim) != p->struck);
}

static void last_life(struct play *p)
{
	start(p);
	fw_scanned(&p->w);
	look(p);
	judge(p);
	fw_end(&p->w);
}

static void play(uint64_t seed, bool faults)
{
	static const uint64_t most[] = {100000, 2000000, 20000000};
	static struct play play;
	struct play *p = &play;
	struct fw_args args = {.seed = seed};
	uint64_t lives;

	playing = seed;
	memset(p, 0, sizeof(*p));
	p->seed = seed;
	p->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
	p->faults = faults;
	args.memory_slabs = 3 + (uint32_t)draw(p, 6);
	args.file_slabs = 1 + (uint32_t)draw(p, 4);
	if (draw(p, 4) == 0) {
		args.capacity = args.file_slabs * 40 * KIB + 4 * KIB;
		args.file_slabs = 0;
	}
	fw_begin(&p->w, &args);
	disk_sim_delays(p->w.sim, 20000, most[draw(p, ARRAY_LEN(most))]);
	lives = 1 + draw(p, 4);
	for (uint64_t i = 0; i < lives; i++)
		live(p);
	last_life(p);
	playing = 0;
}

/* ---- cases ---- */

static void say_seed(void)
{
	if (playing)
		fprintf(stderr, "schedule: KVD_FILES_SEED=%ju\n", (uintmax_t)playing);
}

static void on_abort(int sig)
{
	say_seed();
	signal(sig, SIG_DFL);
	raise(sig);
}

/* A sanitizer's, where there is one. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static int end_case(void **state)
{
	(void)state;
	say_seed();
	playing = 0;
	return 0;
}

static void play_all(uint64_t first, uint64_t count, bool faults)
{
	const char *seed = getenv("KVD_FILES_SEED"),
		   *most = getenv("KVD_FILES_SCHEDULES");

	memset(tally, 0, sizeof(tally));
	count = most ? strtoull(most, NULL, 10) : sweep_part(&first, count, 10);
	if (seed) {
		first = strtoull(seed, NULL, 10);
		count = 1;
	}
	for (uint64_t i = 0; i < count; i++)
		play(first + i, faults);
	print_message("%ju schedules: %ju lives, %ju losses of power, %ju told to last, "
		      "%ju read whole, %ju not, %ju erased, %ju evicted, %ju faults\n",
		      (uintmax_t)count, (uintmax_t)tally[LIVES], (uintmax_t)tally[LOST],
		      (uintmax_t)tally[TOLD], (uintmax_t)tally[JUDGED],
		      (uintmax_t)tally[BAD], (uintmax_t)tally[ERASED],
		      (uintmax_t)tally[EVICTED], (uintmax_t)tally[FAULTED]);
}

static void files_survive_losses_of_power(void **state)
{
	(void)state;
	play_all(1, SCHEDULES, false);
}

static void files_survive_losses_of_power_and_faults(void **state)
{
	(void)state;
	play_all(UINT64_C(1) << 32, SCHEDULES * 2 / 3, true);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(files_survive_losses_of_power, end_case),
		cmocka_unit_test_teardown(files_survive_losses_of_power_and_faults,
					  end_case),
	};

	log_threshold = getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : -1;
	/* what a store takes at once is taken again and again */
	mallopt(M_MMAP_THRESHOLD, 16 << 20);
	mallopt(M_TRIM_THRESHOLD, 256 << 20);
	signal(SIGABRT, on_abort);
	if (__sanitizer_set_death_callback)
		__sanitizer_set_death_callback(say_seed);
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
