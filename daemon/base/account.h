/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account: memory that the daemon uses for one principal, in bytes and in objects.
 *
 * A principal is an engine's user ("uid:1000"), or another daemon: by the name of its key
 * ("peer:decode"), or without keys by its address ("addr:192.0.2.7"). So many processes,
 * sessions or daemons of one principal count as one. An object that is kept carries a
 * `struct charge`, which remembers its account and amount, so that exactly the charged
 * amount is released.
 *
 * All accounts share one ceiling, the option `memory_limit`; the last eighth of it is
 * reserved for principals with little (share.h). The loop's thread only: memory that a
 * helper allocates is charged before the job starts or after it ends.
 */
#ifndef KVD_BASE_ACCOUNT_H
#define KVD_BASE_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

struct metrics;

/* X(NAME, "name", "contents") */
#define ACCOUNT_CLASSES(X)                                                          \
	X(SESSIONS, "sessions", "sessions: their connections and status pages")     \
	X(REGIONS, "regions", "imported memory: its page tables")                   \
	X(FILLED, "filled", "pages of imported memory that its owner had not made") \
	X(LISTS, "lists", "prepared lists and indices of transfers")                \
	X(PLANS, "plans", "plans of transfers, posted, held or kept")               \
	X(ROOMS, "rooms", "rooms and their parties")                                \
	X(PAGES, "pages", "page lists of rooms, and pages that arrived")            \
	X(LAYOUTS, "layouts", "pools, and other daemons' pools and sessions")       \
	X(ORPHANS, "orphans", "requests for rooms not opened yet")                  \
	X(CHUNKS, "chunks", "chunks, and numbers already used")                     \
	X(NOTIFS, "notifs", "notifications sent but not yet read")                  \
	X(REPLIES, "replies", "replies waiting to be read")                         \
	X(PARTS, "parts", "incomplete messages from other daemons")                 \
	X(ATTACHES, "attaches", "attachments to other sessions, and secrets")       \
	X(ATTENDS, "attends", "query rows of attention requests, and their results")

enum account_class {
#define ACCOUNT_ENUM(id, name, help) ACCOUNT_##id,
	ACCOUNT_CLASSES(ACCOUNT_ENUM)
#undef ACCOUNT_ENUM
		ACCOUNT_CLASS_END,
};

#define ACCOUNT_NAME_MAX 96u

struct account {
	struct account *next;
	struct accounts *accounts;
	char name[ACCOUNT_NAME_MAX];
	unsigned int refs; /* sessions, peers; freed at 0 with nothing charged */
	uint64_t objects[ACCOUNT_CLASS_END], bytes[ACCOUNT_CLASS_END];
	uint64_t total; /* of bytes */
	uint64_t refused;
	uint64_t fds;	 /* of descriptors, about */
	uint64_t served; /* loop_fd.served of its connections */
};

/* All zero: no accounts yet, and no ceiling. */
struct accounts {
	struct account *first;
	unsigned int count;
	uint64_t limit; /* bytes; 0: none */
	uint64_t total;
	uint64_t fds, fds_limit; /* 0: none */
	struct metrics *metrics; /* NULL: not counted */
};

/* All zero: nothing. */
struct charge {
	struct account *account;
	uint64_t bytes;
	enum account_class class;
	unsigned int fds;
};

/* The principal's account, created if needed, with a new reference; NULL + ERR_NOMEM. */
struct account *account_get(struct accounts *accounts, const char *kind,
			    const char *name);
void account_ref(struct account *account); /* NULL is allowed, here and below */
void account_unref(struct account *account);

/*
 * One object of so many bytes, which *charge (all zero) is to remember. ERR_LIMIT names
 * the principal, the class, the amount held, the ceiling and the option. No account
 * (NULL) is charged nothing.
 */
int charge_take(struct charge *charge, struct account *account, enum account_class class,
		uint64_t bytes);
/* The same, never refused: for objects with their own cap that must stay available for
 * diagnosis, when one principal holds all the rest. */
void charge_force(struct charge *charge, struct account *account,
		  enum account_class class, uint64_t bytes);
/* The object keeps so many descriptors, too, of the engines' part of RLIMIT_NOFILE, until
 * charge_drop(); the last eighth is reserved for principals with few. ERR_LIMIT, or not
 * refused. */
int charge_fds(struct charge *charge, unsigned int count);
void charge_fds_force(struct charge *charge, unsigned int count);
/* Adds this many bytes to the same object. A charge without an account adds nothing. */
int charge_more(struct charge *charge, uint64_t bytes);
void charge_more_force(struct charge *charge, uint64_t bytes); /* never refused */
void charge_less(struct charge *charge, uint64_t bytes);
/*
 * So many bytes of a partly received message, of the class `parts`: a principal can
 * create them with little traffic and nothing refuses them later, so that besides
 * account_check() it may hold a sixteenth of the ceiling of them, or `least` bytes where
 * that is more. *charge may hold some already.
 */
int charge_parts(struct charge *charge, struct account *account, uint64_t bytes,
		 uint64_t least);
/* Releases the whole charge; idempotent. */
void charge_drop(struct charge *charge);
/* Moves a charge together with its owner. */
static inline struct charge charge_steal(struct charge *charge)
{
	struct charge stolen = *charge;

	*charge = (struct charge){0};
	return stolen;
}

/* It is at its cap: a caller that can wait should. NULL is allowed. */
bool account_is_full(const struct account *account);
/* Would this many more bytes fit a principal's account? As charge_take(). */
int account_check(struct account *account, enum account_class class, uint64_t bytes);
/* Raises its refusal, for callers that detected the lack of space themselves:
 * ERR_LIMIT. */
int account_refuse(struct account *account, enum account_class class, uint64_t bytes);

/* How many bytes more would pass, for callers that cannot check in time. At least 1,
 * because 0 means "no limit" to some of them; UINT64_MAX: any. */
uint64_t account_room(const struct account *account);

/* The most that one principal may hold while others hold nothing. */
uint64_t accounts_share(const struct accounts *accounts);
/* Nothing is charged, nothing holds a reference. */
bool accounts_idle(const struct accounts *accounts);

extern const char *const account_class_names[ACCOUNT_CLASS_END];

/* The option's default: a sixteenth of the machine's memory, or of the control group's
 * limit where that is less; 256 MiB to 8 GiB. */
uint64_t accounts_preset(void);

#endif
