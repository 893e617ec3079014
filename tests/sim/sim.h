/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sim: rooms of whole clusters under scripted trouble, in virtual time.
 *
 * A run is a script: knobs and events with times, written from a seed before
 * anything runs (script.c). Every event carries its own draw, so leaving one
 * out changes no other: that is how a failing script is made short (shrink.c).
 * play.c lets engines and the network act; judge.c looks at what an engine can
 * see (answers, status words, its own memory) and knows nothing else.
 *
 * A run is a process of its own (main.c); a broken promise ends it through
 * sim_broken(), a crash ends it as it likes: both are failures of its seed.
 */
#ifndef KVD_TESTS_SIM_H
#define KVD_TESTS_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/wire.h"
#include "tests/lib/cluster.h"

#define SIM_MS LOOP_NS_PER_MS
#define SIM_EVENTS_MAX 1024u
#define SIM_PLACES_MAX 8u /* machines */
#define SIM_SIDE_MAX 4u	  /* ranks of a side */
#define SIM_ENGINES_MAX (2 * SIM_SIDE_MAX)
#define SIM_REQUESTS_MAX 8u
#define SIM_CHUNKS_MAX 3u
#define SIM_TOKENS 64u /* of a cache */
#define SIM_PAGES_MAX 32u
#define SIM_GRAVES_MAX 128u
#define SIM_KEPT_BYTES 1500u /* of a message of the past */

/* ---- script ---- */

/* M(NAME, weight in a troubled run, is it trouble, words) */
#define SIM_EVENTS(M)                                                           \
	M(REQUEST, 90, 0, "a request begins")                                   \
	M(STEP, 520, 0, "engines do what comes next of a request")              \
	M(AGAIN, 15, 0, "an engine sends a chunk again")                        \
	M(CLOSE, 200, 0, "engines close what has ended")                        \
	M(ABORT, 22, 1, "an engine aborts its room")                            \
	M(POOL, 4, 1, "an engine withdraws its pool and registers it again")    \
	M(ENGINE, 10, 1, "an engine dies, or comes")                            \
	M(CRASH, 4, 1, "a daemon dies; it is started again later")              \
	M(BREAK, 14, 1, "the control line breaks")                              \
	M(PARTITION, 8, 1, "the control line is cut")                           \
	M(CUT, 10, 1, "the data line breaks")                                   \
	M(DOWN, 8, 1, "the data line stands still")                             \
	M(MUTE, 5, 1, "a daemon is cut off from everybody")                     \
	M(HEAL, 14, 0, "all lines are whole again")                             \
	M(RULE, 40, 1, "a transfer goes wrong")                                 \
	M(HOLD, 10, 1, "a daemon's helpers take their time")                    \
	M(GO, 20, 0, "helpers are done")                                        \
	M(MEMORY, 8, 1, "a daemon's allocation fails")                          \
	M(QUEUE, 4, 1, "control lines carry few frames at once")                \
	M(REPLAY, 30, 1, "a message of the past comes again")                   \
	M(LIE, 0, 1, "a partner says what is not true")                         \
	M(STRANGER, 30, 0, "a daemon without the ticket asks for a room")       \
	/* of the beginning: how this run's network is */                       \
	M(KNOB, 0, 0, "a property of the network")                              \
	/* of scripts with requesters (attend.h) */                             \
	M(ROWS, 0, 0, "a requester posts query rows")                           \
	M(CHUNKS, 0, 0, "a requester puts, holds or drops chunks")              \
	M(REQUESTER, 0, 1, "a requester cancels, takes its seats back or dies") \
	M(KERNEL, 0, 1, "a daemon's kernels take their time, or are done")      \
	M(FORGE, 0, 1, "a message about attends is forged, or comes again")

enum sim_kind {
#define SIM_KIND(NAME, weight, trouble, words) SIM_##NAME,
	SIM_EVENTS(SIM_KIND)
#undef SIM_KIND
		SIM_KINDS,
};

struct sim_event {
	uint32_t after_us; /* the event before it */
	uint32_t kind;
	uint64_t draw;
};

struct sim_script {
	uint64_t seed;
	bool calm;  /* nothing goes wrong: every request must succeed */
	bool liars; /* partners lie: what they say may be believed */
	bool asks;  /* each place has chunks, and a requester */
	unsigned int places, sources, sinks;
	unsigned int count;
	struct sim_event events[SIM_EVENTS_MAX];
};

/* Random numbers of one event. */
struct sim_draw {
	uint64_t state;
};
uint64_t sim_next(struct sim_draw *d);
unsigned int sim_below(struct sim_draw *d, unsigned int n);
bool sim_chance(struct sim_draw *d, unsigned int percent);

void sim_script_write(struct sim_script *script, uint64_t seed, bool liars);
void sim_script_print(const struct sim_script *script);
bool sim_is_trouble(unsigned int kind);

/* ---- world ---- */

struct sim_engine {
	unsigned int place;
	bool exists, source, alive;
	struct session *session;
	uint64_t epoch; /* of its last session */
	struct cache cache;
	uint8_t *shadow;     /* what the cache must hold */
	const uint8_t *page; /* status page, as the engine maps it */
	uint32_t pages_used, aux_used;
};

/* Another engine beside a source: its pool has the same name and rank, its rooms the same
 * numbers and tickets, and its bytes are nobody's. */
struct sim_namesake {
	struct session *session;
	struct cache cache;
};

/* In every third script; then sources are named by their sessions. */
static inline bool sim_has_namesakes(const struct sim_script *script)
{
	return script->seed % 3 == 0;
}

/* one room of a request */
struct sim_side {
	struct sim_engine *engine;
	const char *role;
	unsigned int pages[SIM_PAGES_MAX], page_count, aux;
	unsigned int steps; /* done so far: open, then bind or chunks */
	uint32_t slot, gen;
	bool open, bound, ended, success, gone, refused, orphaned; /* engine died */
	bool met; /* recv: it has shown that its sources are there */
	uint64_t opened_ns;
	uint64_t ended_ns, last_ns; /* its end; its last command or contact */
};

/* Every second number's rooms have a ticket. */
static inline bool sim_has_ticket(uint64_t number)
{
	return number % 2 == 1;
}

struct sim_request {
	bool used, pull;
	bool late;    /* pull: pages are bound later */
	bool told;    /* pull: the pullers say how many they are */
	bool lied;    /* a partner lied: who believes it is not to blame */
	bool misled;  /* a partner of the past introduced itself again */
	bool stopped; /* an engine gave up on it */
	bool fresh;   /* its number was never used before */
	uint64_t number, key, troubles, aborts;
	unsigned int tokens, prefix; /* the destination binds [prefix, tokens) */
	unsigned int chunks, cut[SIM_CHUNKS_MAX + 1], order[SIM_CHUNKS_MAX];
	struct sim_side sides[SIM_ENGINES_MAX];
};

struct sim {
	const struct sim_script *script;
	struct cluster c;
	unsigned int at[SIM_PLACES_MAX]; /* index of the living node of a place */
	struct sim_engine engines[SIM_ENGINES_MAX];
	struct sim_namesake namesakes[SIM_SIDE_MAX];
	struct sim_request requests[SIM_REQUESTS_MAX];
	struct cache graves[SIM_GRAVES_MAX];
	unsigned int grave_count;
	uint64_t next_number;
	uint64_t troubles;	 /* of the script, so far */
	uint64_t aborts;	 /* of them: engines that aborted a room */
	uint64_t trouble_ns;	 /* when the last of them ended, or UINT64_MAX */
	unsigned int lines_hurt; /* until HEAL */
};

/* What all processes of a run share, added up by main.c. */
struct sim_totals {
	uint64_t scripts, events, rooms, sides_succeeded, sides_failed, troubled_rooms;
	uint64_t calm_rooms, virtual_ms, posts, posts_succeeded;
	uint64_t kinds[SIM_KINDS];
	uint8_t pairs[4][7][64]; /* role, state (6: none), message */
	uint64_t seed;		 /* that runs now */
	char broken[400];	 /* the promise that was broken */
};
extern struct sim_totals *sim_totals;

void sim_broken(const struct sim *sim, const char *fmt, ...)
	__attribute__((format(printf, 2, 3), noreturn));

/* play.c */
void sim_play(const struct sim_script *script);
struct kvd *sim_kvd(struct sim *sim, unsigned int place);
bool sim_answered_ok(cJSON *answer);
unsigned int sim_side_count(const struct sim *sim, bool source);

/* trouble.c: what goes wrong around the engines */
void sim_trouble(struct sim *sim, const struct sim_event *event);
void sim_heal(struct sim *sim);
uint64_t sim_troubles(const struct sim *sim);

/* judge.c */
void sim_fill(const struct sim_side *side, const struct sim_request *req, uint64_t key);
void sim_observe(struct sim *sim);
void sim_check_memory(struct sim *sim);
void sim_check_engine(struct sim *sim, struct sim_engine *engine);
void sim_check_all_ended(struct sim *sim);

/* past.c: messages of the past, lies, and which (state, message) pairs were met */
void sim_past_begin(struct sim *sim);
void sim_past_end(void);
/* Did a receiver of the past introduce itself to this room number lately? */
bool sim_past_misleads(const struct sim *sim, uint64_t number);
bool sim_past_replay(struct sim *sim, struct sim_draw *d);
#define SIM_STRANGERS_WORDS "a stranger said so"
/* Changes nothing. */
void sim_past_stranger(struct sim *sim, struct sim_draw *d);
struct sim_request *sim_past_lie(struct sim *sim, struct sim_draw *d);
struct sim_kept {
	struct kvd *kvd;
	struct remote *remote;
	uint8_t instance[16];
	struct wire_header header;
	uint8_t body[SIM_KEPT_BYTES];
	size_t len;
};
/* Copied, if it is not too long. */
bool sim_past_keep(struct sim_kept *kept, struct kvd *kvd, struct remote *remote,
		   const struct wire_header *h, const struct cursor *body);
/* Are both, and the line between them, as they were? */
bool sim_past_still_there(struct sim *sim, const struct sim_kept *kept);
/* Who is up, of those that this daemon knows; or NULL. */
struct remote *sim_past_remote(const struct kvd *kvd, struct sim_draw *d);
/* To the daemon itself. */
int sim_past_pass(struct kvd *kvd, struct remote *remote, const struct wire_header *h,
		  struct cursor *body);
void sim_pairs_print(void);
unsigned int sim_pairs_missing(void);

/* attend.c: nothing happens in scripts without requesters, which are all without the
 * module attend (asks_none.c). sim_ask_act(): was it trouble? */
extern const bool sim_asks_built;
void sim_ask_begin(struct sim *sim);
bool sim_ask_act(struct sim *sim, const struct sim_event *event);
/* A message about attends that came to a daemon. */
int sim_ask_message(struct sim *sim, struct kvd *kvd, struct remote *remote,
		    const struct wire_header *h, struct cursor *body);
void sim_ask_heal(struct sim *sim);
void sim_ask_place_dies(struct sim *sim, unsigned int place);
void sim_ask_place_comes(struct sim *sim, unsigned int place);
void sim_ask_observe(struct sim *sim);
void sim_ask_check_memory(struct sim *sim);
void sim_ask_check_ended(struct sim *sim);
/* All requesters are gone; nothing of them is left; the cluster is. */
void sim_ask_leave(struct sim *sim);
void sim_ask_end(struct sim *sim);
void sim_ask_bury(struct sim *sim);

/* shrink.c: `fails` runs a script elsewhere. Leaves the shortest that fails. */
void sim_shrink(struct sim_script *script, bool (*fails)(const struct sim_script *script),
		unsigned int tries);

#endif
