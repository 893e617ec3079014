/* SPDX-License-Identifier: Apache-2.0 */
/* store_impl: shared by the sources store*.c; the head of each describes its task. */
#ifndef KVD_STORE_IMPL_H
#define KVD_STORE_IMPL_H

#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/base/sm.h"
#include "daemon/cost/pace.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/work.h"
#include "daemon/plan/canon.h"
#include "daemon/session/session.h"
#include "daemon/store/arena.h"
#include "daemon/store/store.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_kv.h"

struct files;
struct room_leg;
struct store_chunk;
struct store_class;
struct store_part;

/* Of a daemon, as the next; the latter for users with few. */
#define STORE_SPACES_MAX 256u
#define STORE_POOLS_MAX 256u  /* classes: each is a pool that peers can name */
#define STORE_CLASSES_MAX 64u /* of a space: bits of a mask */
#define STORE_COVERS_MAX 64u  /* sets of classes that a handle remembers */
#define STORE_COVERS_NEW 16u  /* of them new ones in one call */

/* Waits for parts, or for the pool of a class: it exists from now on, or never will
 * (`why`). */
struct store_waiter {
	struct list link; /* in store->waiters, class->waiting; in none when woken */
	void (*wake)(struct store_waiter *waiter, const struct err *why);
};

/* Calls from parts to files (files.c). */
struct file_ops {
	/* As files_write(). */
	bool (*write)(struct files *files, struct store_part *part, bool durable);
	/* Read it into its slot of memory; store_part_loaded() follows. ERR_NOMEM,
	 * ERR_STATE. */
	int (*load)(struct files *files, struct store_part *part);
	/* Overwrites the headers of its parts; of a part being read or written,
	 * afterwards. They keep their slots until that is durable. */
	void (*erase)(struct files *files, struct store_chunk *chunk);
	void (*forget)(struct store_class *class); /* it ends */
};

/* Observer of the contents of memory: keep.c. */
struct part_observer {
	/* The part's bytes are in its slot; they are about to be evicted. */
	void (*on_ready)(struct part_observer *observer, const struct store_part *part);
	void (*on_gone)(struct part_observer *observer, const struct store_part *part);
};

struct store_tenant {
	struct list link; /* in store->tenants */
	struct store *store;
	struct account *account;		/* named so; held */
	struct arena_owner *owner, *file_owner; /* of memory; of files, or NULL */
	unsigned int spaces, classes;
	unsigned int going;	     /* evicted spaces that still have chunks */
	bool left;		     /* not counted as a user, until it is active again */
	unsigned int asking;	     /* open queries to other daemons */
	uint32_t published;	     /* parts in engines' pages */
	struct store_events *events; /* NULL: never requested */
};

/* The layout of parts of one kind: a pool over the whole memory. Or in pages of an
 * engine's pool, with its layout (store_pages.c). */
struct store_class {
	struct store_space *space;
	unsigned int index; /* in space->classes; the rank of its layout */
	struct canon *canon;
	struct pool *pool; /* NULL: not needed by a move yet, or it could not be made */
	cJSON *layout, *regions; /* while it is being registered */
	struct list waiting;	 /* for it: struct store_waiter.link */
	uint64_t parts;
	struct list all;      /* of them: struct store_part.class_link */
	unsigned int users;   /* moves that fill it */
	uint64_t used;	      /* store->uses when it was used last; 0: not yet */
	uint64_t generation;  /* of its newest part that a start found in a file */
	bool published;	      /* in an engine's pages; pool NULL: the engine has exited */
	uint64_t publisher;   /* its session, and the following: */
	struct list pages;    /* struct store_pages.link: of present parts */
	struct list left;     /* the same: withdrawn, with readers */
	struct list readings; /* struct store_reading.link */
	struct list leave_link;	   /* in store->leaving */
	uint32_t kept;		   /* keep.c's number of it; 0: none yet */
	struct class_words *words; /* its description in files; or NULL */
	struct charge charge;
};

struct store_space {
	struct list link; /* in store->spaces */
	struct store *store;
	struct store_tenant *tenant;
	uint64_t id; /* salts the index */
	uint32_t tokens;
	char *identity;					/* equal texts, equal spaces */
	uint8_t digest[16];				/* of it, to other daemons */
	char *model, *revision, *scheme, *rope;		/* of the identity, for display */
	struct store_class *classes[STORE_CLASSES_MAX]; /* NULL: free */
	unsigned int class_count;
	uint64_t class_changes; /* a bit may mean another class since then */
	uint64_t published;	/* classes in engines' pages, as bits */
	uint64_t leaving;	/* of them, those of exited engines */
	unsigned int handles;	/* sessions' and other uses that are open */
	uint64_t used;		/* store->uses when the last one ended; 0: not yet */
	bool going;		/* it is evicted, and is in store->going */
	uint64_t chunks, bytes, pinned;
};

/* Which classes of a set serve a handle. */
struct store_cover {
	uint64_t mask, used; /* used 0: they do not hold all that it needs */
};

struct store_covers {
	uint64_t changes; /* space->class_changes: the values below are valid for it */
	/* classes: checked ones; of these, those that serve alone; and those with the
	 * handle's own layout */
	uint64_t asked, alone, own;
	struct store_cover of[STORE_COVERS_MAX];
	unsigned int next;
};

struct store_handle {
	struct store_space *space;
	struct session *session;
	uint64_t id;
	unsigned int refs; /* itself, holds, moves */
	bool closed;
	struct canon *canon; /* of its rank */
	char **views;	     /* requested ones; NULL: all */
	uint32_t view_count;
	struct store_covers covers;
	uint64_t pool_id; /* the last matching pool */
	struct charge charge;
};

/* Its bytes in memory, or in an engine's pages. */
enum part_memory {
	PART_OUT,     /* no slot in memory */
	PART_FILLING, /* by an engine, or from its file */
	PART_HEDGING, /* by a hedge */
	PART_READY,   /* complete */
};

/* Its bytes in a file: each state has what the ones before it have. */
enum part_file {
	PART_UNFILED,
	PART_FILED, /* it has a slot there */
	PART_SURE,  /* it was read whole, or written by this daemon */
	PART_LASTS, /* durable */
};

struct store_part {
	struct list link; /* in chunk->parts */
	struct list class_link;
	struct store_chunk *chunk;
	struct store_class *class;
	struct arena_slot slot,
		place;		   /* slot of memory, slot of a file: at least one; or */
	struct store_pages *pages; /* an engine's; else NULL */
	uint8_t memory, file;	   /* enum part_memory, part_file; by part_set() */
	uint8_t tries;		   /* failed attempts to make it durable */
	uint64_t generation;	   /* of its header in the file */
	struct files_job *job;	   /* the job on its slot; or NULL */
};

struct store_chunk {
	struct arena_item item;
	/* A look-up reads the members from the item's hits to the tokens: they are
	 * adjacent. */
	struct store_chunk *next; /* of its bucket */
	struct store_space *space;
	uint8_t id[STORE_ID_BYTES];
	uint64_t ready, filed; /* masks of the classes of such parts; by part_set() */
	uint64_t first;	       /* its number in its prompt, or STORE_ANYWHERE */
	uint32_t tokens;       /* held: of the space's, or fewer */
	bool gone;	       /* not in the index any more */
	uint8_t shown;	       /* STORE_IN_…: the published state */
	uint64_t lasts;	       /* a mask as ready */
	struct list parts;
	struct arena_item file_item;
};

/* Classes of parts that can be read now; that lie in memory of the store's, or in files.
 */
static inline uint64_t store_chunk_ready(const struct store_chunk *chunk)
{
	return chunk->ready & ~chunk->space->leaving;
}
static inline uint64_t store_chunk_kept(const struct store_chunk *chunk)
{
	return (chunk->ready & ~chunk->space->published) | chunk->filed;
}
/* Its bytes can be read, or are being loaded. */
static inline bool store_part_placed(const struct store_part *part)
{
	return part->memory != PART_OUT;
}

struct store {
	struct kvd *kvd;
	struct session *session; /* of memory and rooms of its own; NULL: it ends */
	struct region *region;	 /* NULL: being made, or failed */
	struct err failed;
	uint64_t memory_bytes;
	uint8_t *base; /* of the memory, once it is registered */
	struct arena *arena;
	struct keep *keep;		/* NULL: it ends with the process */
	struct part_observer *observer; /* NULL: none */
	struct files *files;		/* NULL: none, as the next */
	const struct file_ops *file_ops;
	struct arena *file_arena;
	struct list tenants, spaces;
	unsigned int tenant_count, space_count, class_count;
	uint64_t next_space, uses;
	struct list going; /* struct store_space.link: evicted ones */
	struct loop_defer going_go;
	struct store_chunk **buckets;
	uint64_t bucket_mask, seed;
	uint8_t instance[16]; /* of this run, as in events */
	uint64_t chunk_count;
	struct far *far; /* NULL: no other daemon is queried */
	struct live *costs;
	struct homes *homes;	    /* NULL: no updates are sent */
	struct home *home;	    /* NULL: this daemon is no index node */
	uint64_t remote_leg_checks; /* remote_hold.c: parts checked for subtransfers of
				       others */
	struct list pins;	    /* store_pins.c: chunks being unpinned */
	struct loop_work unpinning;
	uint32_t published;	/* parts in engines' pages, and withdrawn records */
	uint32_t published_max; /* the latter for users with few */
	uint64_t left;		/* of them, ever */
	struct list leaving;	/* struct store_class.leave_link: of exited engines */
	struct loop_defer leaving_go;
	struct strmap holds; /* by secret */
	unsigned int moves, moves_live;
	/* struct store_waiter.link: those that wait for parts, are about to be woken */
	struct list waiters, waking;
	struct loop_work wake;
	struct idmap far_rooms; /* store_leg.c: holders' offers, by number */
	struct list hedges;	/* struct store_move.hedge_link */
	struct pace_budget hedging;
	struct store_figures figures; /* counters; store_figures() adds the others */
	uint64_t far_dials, far_dials_refused; /* of holders that index nodes named */
	uint64_t covers;		       /* that were made */
	struct loop_defer tidy;		       /* removes unused spaces */
};

/* session->part[MODULE_STORE] */
struct store_session {
	struct idmap handles, holds, moves;
	unsigned int publishes; /* classes in pages of its pools */
};

static inline struct store_session *store_session(const struct session *session)
{
	return session->part[MODULE_STORE];
}

/* remote->part[MODULE_STORE] */
struct store_remote {
	/* subtransfers of fetches from it: store_leg.c */
	uint64_t pull_ended_ns; /* the last one's end */
	struct pace pace;
	/* its holds here: remote_hold.c */
	struct list holds; /* struct remote_hold.link */
	struct idmap asks; /* the open ones */
	unsigned int hold_count, lookups, legs;
};

static inline struct store_remote *store_remote(const struct remote *remote)
{
	return remote->part[MODULE_STORE];
}

struct store_hold {
	struct store_handle *handle; /* a reference */
	uint64_t id;
	uint8_t secret[STORE_SECRET_BYTES];
	uint64_t first, tokens; /* first: 0 where the position is unknown */
	bool anywhere;
	/* Pinned until it ends; NULL: at another daemon, of those in `far`. */
	struct store_chunk **chunks;
	struct far_hold *far; /* or NULL */
	uint32_t count;
	uint32_t here;		 /* chunks before the first one at another daemon */
	uint8_t *far_ids;	 /* of the chunks after these; or NULL */
	unsigned int pieces;	 /* at other daemons */
	uint32_t away;		 /* chunks of them */
	unsigned int moves;	 /* readers */
	bool closed, over;	 /* over: the lease has ended */
	struct far_query *query; /* in progress: then on_done is due */
	void (*on_done)(void *arg, struct store_hold *hold, const struct err *why);
	void *arg;
	struct loop_timer lease;
	uint64_t lease_ns, far_ns;	  /* of its arguments */
	uint64_t far_until_ns;		  /* the end of far_ns; 0: it has not begun */
	struct charge charge, far_charge; /* far_charge: of far_ids */
	/* Chunks are added, then touched, some a turn; on_done is due if not in one. */
	struct loop_work adding;
	struct store_ids ids; /* from chunk `here` on: the caller's, later far_ids */
	uint32_t added_from;  /* chunks before it were added earlier */
	uint32_t touched;     /* chunks from it on were */
	bool added;	      /* all are added */
	unsigned int covers_left;
};

/* ---- store.c ---- */
/* A store without memory, files and a session, which store_begin() gives it. */
int store_make(struct kvd *kvd, struct store **store_p);
/* Removes unused objects, in a later turn. */
void store_tidy(struct store *store);
/* A part was filled or loaded, or will not be; or it is durable: wakes its waiters, some
 * a turn. */
void store_wake(struct store *store);
void store_wake_init(struct store *store);

/* ---- store_tenant.c ---- */
/* Found or made. `generation`: of a part in a file that names it; STORE_NOW, which is
 * later than all of these: from an engine. */
#define STORE_NOW UINT64_MAX
int store_tenant_of(struct store *store, struct account *account, uint64_t generation,
		    struct store_tenant **tenant_p);
void store_tenants_tidy(struct store *store); /* removes those without spaces */

/* ---- store_cover.c ---- */
/* The classes that give the handle all it needs of a chunk in these; 0: none. */
uint64_t store_cover(struct store_handle *handle, uint64_t mask);
/* The same, of a call about many chunks: *left_p counts down the new sets, from
 * STORE_COVERS_NEW; after that an unknown set is 0. */
uint64_t store_cover_some(struct store_handle *handle, uint64_t mask,
			  unsigned int *left_p);
/* The same of any layouts: bit i is layouts[i]; where several do, the first. *lack_p: set
 * when memory is short. */
uint64_t store_cover_layouts(const struct store_handle *handle,
			     const struct layout *const *layouts, unsigned int count,
			     bool *lack_p);

/* ---- store_space.c ---- */
struct store_space *store_space_by_digest(const struct store *store,
					  const uint8_t digest[16]);
/* Is the pool's layout the handle's? ERR_LAYOUT. */
int store_handle_fits(struct store_handle *handle, const struct pool *pool);
/* A move's pages: each view of the space, all layers, the same tokens; or a selection of
 * one view. ERR_INVAL. */
int store_maps_check(const struct store_handle *handle, const struct room_maps *maps,
		     uint64_t *begin_p, uint64_t *end_p);
int store_words_check(const struct store_space_args *args); /* ERR_INVAL */
/* The space of these labels, found or made; as an engine's of this tenant. */
int store_space_of(struct store *store, struct store_tenant *tenant,
		   const struct store_space_args *args, const struct canon *canon,
		   uint64_t generation, struct store_space **space_p);
/* The class of such parts, found or made. `generation`: as the space's. */
int store_class_get(struct store_space *space, const struct canon *canon,
		    uint64_t generation, struct store_class **class_p);
/* Outcome 1: it has its pool; 0: that is being made, and those in `waiting` are woken.
 * One that failed before is tried again. */
int store_class_pool(struct store_class *class);
/* The layout of the handle's rank; its pool exists or is being made. */
int store_class_of(struct store_handle *handle, struct store_class **class_p);
/* The class of such parts in pages of this pool, found or made. */
int store_class_published(struct store_space *space, const struct canon *canon,
			  struct pool *pool, struct store_class **class_p);
void store_spaces_tidy(struct store *store);
/* A user of the space (space->handles) has ended. */
void store_space_let_go(struct store_space *space);
void store_space_free(struct store_space *space); /* no chunks, handles, classes */
/* It has no parts and no waiters. */
void store_class_drop(struct store_class *class);

/* ---- store_evict.c ---- */
/* Evicts the space that has been unused for longest, for one of this user's; `classes`:
 * one that has some. With a generation of files: only one unused since the start whose
 * parts are all older. False: none may be. */
bool store_evict_space(const struct store_tenant *tenant, uint64_t generation,
		       bool classes);
/* The same of the space's classes, and of users with all of their spaces. False, too: of
 * a class with more parts than a turn may free, some were freed. */
bool store_evict_class(struct store_space *space, uint64_t generation);
bool store_evict_tenant(struct store *store);
void store_evict_init(struct store *store);
void store_evict_fini(struct store *store); /* evicted spaces are freed */

/* ---- store_chunk.c ---- */
/* The position of chunk i in its prompt, and the base of its number in the call. */
static inline uint64_t store_ids_place(const struct store_ids *ids, uint32_t i)
{
	return ids->first == STORE_ANYWHERE ? STORE_ANYWHERE : ids->first + i;
}
static inline uint64_t store_ids_base(const struct store_ids *ids)
{
	return ids->first == STORE_ANYWHERE ? 0 : ids->first;
}
int store_index_new(struct store *store);
void store_index_free(struct store *store);
struct store_chunk *store_chunk_find(const struct store_space *space,
				     const uint8_t id[STORE_ID_BYTES], uint64_t first);
/* The chunk of one of the ids. */
struct store_chunk *store_chunk_of(const struct store_handle *handle,
				   const struct store_ids *ids, uint32_t i);
/* Made if need be; pinned. */
int store_chunk_get(struct store_space *space, const uint8_t id[STORE_ID_BYTES],
		    uint64_t first, uint32_t tokens, struct store_chunk **chunk_p);
void store_chunk_pin(struct store_chunk *chunk);
/* Frees one without pins and parts. */
void store_chunk_unpin(struct store_chunk *chunk);
/* A slot for this class's part of a pinned chunk, which an engine fills, or a hedge.
 * Others may be evicted for it: ARENA_LATER, as arena_take_some(). */
int store_part_try(struct store_chunk *chunk, struct store_class *class,
		   enum part_memory filling, struct store_part **part_p);
/* In one turn, which may be long. */
static inline int store_part_new(struct store_chunk *chunk, struct store_class *class,
				 enum part_memory filling, struct store_part **part_p)
{
	int r;

	do
		r = store_part_try(chunk, class, filling, part_p);
	while (r == ARENA_LATER);
	return r;
}
/* The same in pages of an engine, which it takes. */
int store_part_in_pages(struct store_chunk *chunk, struct store_class *class,
			struct store_pages *pages, struct store_part **part_p);
/* The same as store_part_new() without a slot: it is in a file. */
int store_part_outside(struct store_chunk *chunk, struct store_class *class,
		       struct store_part **part_p);
void store_part_ready(struct store_part *part);
void store_part_free(struct store_part *part);
void store_part_drop(struct store_part *part); /* and its chunk with the last one */
/* Frees its memory; it is removed unless it has a slot in the files. */
void store_part_leave(struct store_part *part);
/* Results of files.c: the part is in its slot; it is not, and has none. */
void store_part_filed(struct store_part *part);
/* That is verified, or (false) no longer; it is durable. */
void store_part_sure(struct store_part *part, bool sure);
void store_part_lasts(struct store_part *part);
void store_part_unfiled(struct store_part *part);
/* It was read into its memory, or (false) was not: then it has none. */
void store_part_loaded(struct store_part *part, bool whole);
/* A slot of memory, and its bytes from the files; pinned chunk. ERR_LIMIT. */
int store_part_load(struct store_part *part);
/* The same of all parts of these classes that are not in memory; false: not all. */
bool store_chunk_load(struct store_chunk *chunk, uint64_t classes);
/* Requested chunks are worth a file. Of a chain the end first: the first one written is
 * evicted first. */
void store_chunk_touch(struct store_chunk *chunk);
struct store_part *store_part_find(const struct store_chunk *chunk,
				   const struct store_class *class);
void store_on_evict(void *arg, struct arena_item *item);
void store_on_file_evict(void *arg, struct arena_item *item);

/* ---- store_pages.c ---- */
/* The pages of a part that its engine has published. */
struct store_pages {
	struct list link; /* in class->pages, or class->left */
	struct store_class *class;
	struct store_part *part; /* NULL: not yet, or not any more */
	unsigned int readers;	 /* then it is freed with the last of them */
	unsigned int calls;	 /* of the readers: of kernels */
	uint64_t left;		 /* store->left when it was withdrawn */
	struct charge charge;
	uint32_t pages[]; /* of each view, in turn: of a whole chunk, the last one again
			     where a short one has none */
};
/* Can this pool's pages be published: does each view's hold whole chunks, from their
 * first token on? ERR_REQUIRE, ERR_RANGE. */
int store_pages_check(const struct store_handle *handle, const struct pool *pool,
		      const struct room_maps *maps, uint64_t begin);
/* The part that lies in the pages of tokens [begin, end) of maps; pinned chunk. It is not
 * ready. ERR_LIMIT. */
int store_pages_part(struct store_chunk *chunk, struct store_class *class,
		     const struct room_maps *maps, uint64_t begin, uint64_t end,
		     struct store_part **part_p);
void store_pages_ready(struct store_part *part); /* from now on it is readable */
/* Removes the part; its record follows once it has no readers. */
void store_pages_leave(struct store_part *part);
uint32_t store_pages_of_view(const struct store_class *class, uint32_t view);
/* View v of the part, to that many pages. */
void store_pages_copy(const struct store_part *part, uint32_t view, uint32_t *pages);
int store_pages_gone(void); /* ERR_NOTFOUND: they were withdrawn */
/* View v of the pool, as the class's layout has it. */
const struct layout_view *store_pages_view(const struct store_class *class,
					   uint32_t view);
/* An offer of the class's parts of these chunks starts, or a call (`leg` NULL); not a
 * reading if the class is not in an engine's pages. The parts are ready. */
int store_reading_begin(struct store_reading *reading, struct store_class *class,
			struct store_chunk *const *chunks, uint32_t count,
			struct room_leg *leg);
/* Has the engine withdrawn some of them? */
bool store_reading_left(const struct store_reading *reading);
void store_reading_end(struct store_reading *reading); /* idempotent */
/* Of a chunk that is dropped. */
void store_pages_drop(struct store_chunk *chunk);
/* Removes the chunks that the session has published; returns how many. *until_p
 * identifies them and all earlier ones: */
uint32_t store_pages_withdraw(struct store_handle *handle, const struct store_ids *ids,
			      uint64_t *until_p);
/* Do the session's withdrawn pages have readers? */
bool store_pages_read(const struct store_handle *handle, uint64_t until);
/* Fails those readers. */
void store_pages_fail(const struct store_handle *handle, uint64_t until);
/* Its pool is its engine's alone again; removes its parts. */
void store_class_detach(struct store_class *class);
/* Hooks: a session starts to end, or a pool to close: removes what it has published. */
void store_session_closing(struct session *session);
void store_pool_going(struct pool *pool);
void store_pages_init(struct store *store);
void store_pages_fini(struct store *store);

/* ---- store_pins.c ---- */
/* Memory for chunks that a hold pins; NULL + ERR_NOMEM. */
struct store_chunk **store_pins_new(uint32_t most);
/* The first `count` are unpinned, the last ones first, now or in turns to come. NULL is
 * fine. */
void store_pins_end(struct store *store, struct store_chunk **chunks, uint32_t count);
void store_pins_init(struct store *store);
void store_pins_fini(struct store *store);

/* ---- store_hold.c ---- */
int store_lease_over(void); /* raises ERR_LEASE */
void store_hold_ref(struct store_hold *hold);
void store_hold_unref(struct store_hold *hold);

/* ---- store_move.c ---- */
/* One chunk of a move. */
struct store_entry {
	union {
		struct {
			/* pinned; NULL: at another daemon */
			struct store_chunk *chunk;
			/* to be filled; NULL: stored already, left out; fetch */
			struct store_part *part;
			uint32_t tokens;
			bool busy, done; /* a subtransfer moves it, has moved it */
			bool lasts;	 /* put: durable */
			/* fetch: from its file, as no engine's pages have it */
			bool brought;
		};
		uint8_t id[STORE_ID_BYTES]; /* of a put, from `count` on */
	};
};

struct store_leg;

struct store_move {
	struct store *store;
	struct session *session;
	uint64_t id;
	enum store_kind kind;
	struct sm sm;			/* enum store_move_state */
	struct store_handle *handle;	/* a reference */
	struct store_hold *hold;	/* fetch, hedge: a reference */
	struct far_hold *from;		/* hedge: of the hold, the only one queried */
	struct list hedge_link;		/* in store->hedges */
	struct store_class *class;	/* put, hedge */
	struct store_waiter class_wait; /* for the pool of one */
	struct store_waiter part_wait;
	bool durable;	   /* put: until it is durable */
	uint64_t until;	   /* withdraw: readers of the pages withdrawn by then */
	struct pool *pool; /* in use */
	struct room_maps maps;
	struct wait_spec spec;
	struct wait wait;
	bool wait_over;
	uint64_t first;	      /* number of the first entry's chunk in its prompt */
	bool anywhere;	      /* put: these are numbers in the call alone */
	uint64_t begin, end;  /* tokens that move */
	uint64_t token_bytes; /* of a selected token; 0: all of these move */
	struct store_entry *entries;
	uint32_t count;
	/* A put takes its chunks some a turn: of so many, with so many new covers. */
	struct loop_work taking;
	uint32_t named;
	unsigned int covers_left;
	void (*on_taken)(void *arg, struct store_move *move);
	void *arg;
	uint32_t shown;	 /* publish: entries before it are */
	uint32_t kept;	 /* entry: those from it on were released */
	bool letting_go; /* it has succeeded but for that */
	uint32_t next;	 /* entry: each one before is done or in a subtransfer */
	uint32_t cut;	 /* entry: those from it on have no source, for cut_error */
	struct err cut_error;
	uint32_t asked; /* durable put: entries before it were written last */
	struct list legs;
	unsigned int legs_running;
	uint32_t there, left_out, done;
	uint64_t prefix_tokens; /* when it has ended */
	uint64_t bytes, total;
	uint32_t slot, slot_gen;
	struct err error;
	bool dropped;
	struct loop_defer step;
	struct loop_timer deadline;
	struct charge charge;
};
static inline enum store_move_state store_move_state(const struct store_move *move)
{
	return (enum store_move_state)sm_state(&move->sm);
}
/* A subtransfer of it has ended, and is freed. */
void store_move_leg_ended(struct store_move *move, const struct store_leg *leg);
/* Start of one. */
int store_move_room(const struct store_session *part); /* ERR_LIMIT */
int store_move_check(struct store_handle *handle, const struct store_move_args *args);
void store_move_fail_last(struct store_move *move);
/* A put's chunks are taken, or it was aborted before that. */
void store_put_taken(struct store_move *move);
void store_move_args_fini(struct store_move_args *args);
/* Without entries; `args` gives maps and wait. */
int store_move_new(struct store_handle *handle, enum store_kind kind, uint32_t count,
		   struct store_move_args *args, struct store_move **move_p);
void store_move_begin(struct store_move *move, uint64_t deadline_ns);
/* It waits for a part: to be filled, or to be durable. */
void store_move_park(struct store_move *move);
static inline void store_move_kick(struct store_move *move) /* check in the next turn */
{
	loop_defer(move->store->kvd->loop, &move->step);
}
uint64_t store_entry_bytes(const struct store_move *move, uint32_t i);
/* Its number among the hold's chunks. */
static inline uint32_t store_entry_place(const struct store_move *move, uint32_t i)
{
	return (uint32_t)(move->first + i - move->hold->first);
}
/* Are its chunks held at other daemons? */
static inline bool store_entry_far(const struct store_move *move, uint32_t i)
{
	return move->hold && !move->hold->chunks[store_entry_place(move, i)];
}

/* ---- store_lasts.c ---- */
/* All that a durable put took. Outcome 1: durable; 0: not yet. ERR_LIMIT. */
int store_move_lasts(struct store_move *move);

/* ---- store_hedge.c ---- */
void store_hedge(struct store_leg *leg); /* it is late */
/* Ends subtransfers whose chunks have been loaded meanwhile. */
void store_hedge_overtakes(struct store_move *move);
/* A fetch does not need the hedges of these entries. */
void store_hedge_let_go(struct store_move *move, uint32_t first, uint32_t count);

/* ---- store_put.c ---- */
/* The engine's stream has reached its pages: they are complete. */
bool store_publish_show(struct store_move *move);

/* ---- store_leg.c ---- */
/* The slots of a class's parts of these chunks, which are in memory, as pages. */
int store_slots(const struct store_class *class, struct store_chunk *const *chunks,
		uint32_t count, uint64_t first_token, uint64_t begin, uint64_t end,
		struct room_maps *maps);
/* CHUNK_OFFER_NAK: the holder of a subtransfer's chunks refuses it. */
int store_leg_on_nak(struct store *store, struct remote *remote, struct cursor *body);
/* Pieces of a move in one subtransfer: an offer per source and one pull. */
struct store_leg {
	struct list link; /* in move->legs */
	struct store_move *move;
	struct far_hold *far;  /* of move->hold, its holder offers; NULL: this daemon */
	uint32_t first, count; /* entries */
	unsigned int open;     /* rooms that have not ended */
	uint64_t bytes;
	uint64_t began_ns, pulled_ns; /* pulled_ns 0: not yet */
	uint64_t asked, seen;	      /* with a remote source: bytes; pace_begin()'s */
	struct loop_timer late;	      /* fetch, with a remote source */
	bool hedged, beaten; /* also requested from another, and overtaken by it */
	bool left;	     /* an engine has withdrawn pages that it read */
	struct err error;
	struct loop_defer step;
	unsigned int room_count;
	struct store_leg_room *rooms; /* the pull is the first */
};
/* Pieces of a fetch have sources: classes of this daemon, pools of a holder's. */
struct store_sources {
	struct far_hold *far;
	uint64_t used;
};
int store_leg_start(struct store_move *move, uint32_t first, uint32_t count,
		    const struct store_sources *sources);
void store_leg_abort(struct store_leg *leg, const struct err *why);

#endif
