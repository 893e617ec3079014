/* SPDX-License-Identifier: Apache-2.0 */
/*
 * etcd_impl: shared by the files of the etcd directory, and private to them.
 *
 *   etcd.c           the whole; the directory's operations
 *   etcd_request.c   a request: libcurl on the loop
 *   etcd_link.c      endpoints, names, authentication, identity of the store
 *   etcd_lease.c     the lease
 *   etcd_own.c       this daemon's publications
 *   etcd_group.c     the entries of a group, and its readers
 *   etcd_follow.c    ranges and the watch stream
 *
 * libcurl's functions may not be called from inside its callbacks, in which replies are
 * read and readers notified. So a call of the directory only changes the desired state,
 * and one deferred step, etcd_step(), acts on it.
 */
#ifndef KVD_CLUSTER_ETCD_IMPL_H
#define KVD_CLUSTER_ETCD_IMPL_H

#include "daemon/base/idmap.h"
#include "daemon/base/sm.h"
#include "proto/out.h"
#include "daemon/cluster/etcd.h"
#include "daemon/cluster/etcd_key.h"
#include "daemon/cluster/etcd_lib.h"
#include "daemon/cluster/etcd_parse.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/resolve.h"

#define ETCD_OWN_MAX 4096u	/* publications */
#define ETCD_PUTS_MAX 4u	/* in flight: each is a connection */
#define ETCD_RANGES_MAX 2u	/* in flight */
#define ETCD_GROUPS_MAX 256u	/* watched */
#define ETCD_ENTRIES_MAX 65536u /* known, of all groups */
#define ETCD_BYTES_MAX (UINT64_C(128) << 20)
#define ETCD_SOCKETS_MAX 32u
#define ETCD_AGAIN_NS LOOP_NS_PER_S /* delay before a failed step is retried */

struct etcd;

/* ---- a request ---- */

enum etcd_outcome {
	ETCD_ANSWERED, /* `answer` has it */
	ETCD_REFUSED,  /* `answer` has the reason */
	ETCD_BROKEN,   /* the link is down, and was notified */
};

/* Lives in its owner. */
struct etcd_request {
	/* Once, from the loop, not inside libcurl; may start it again. */
	void (*on_done)(struct etcd_request *request, enum etcd_outcome outcome);
	/* Inside libcurl; may be NULL. */
	void (*on_kv)(struct etcd_request *request, const struct etcd_kv *kv);
	void (*on_message)(struct etcd_request *request, const struct etcd_message *m);
	struct etcd_message answer; /* the last one */
	uint64_t bytes;		    /* of the answer so far */
	bool stream;	      /* may be silent without limit after its first message */
	uint64_t patience_ns; /* without progress of the reply */
	/* private */
	struct list link; /* in etcd.requests */
	struct etcd *etcd;
	CURL *easy; /* NULL: idle */
	struct etcd_parser *parser;
	struct curl_slist *headers, *route;
	char *body;
	bool bad; /* the answer is not JSON */
	struct loop_timer timer;
	uint64_t end_ns;
};

void etcd_request_init(struct etcd *e, struct etcd_request *request,
		       void (*on_done)(struct etcd_request *request,
				       enum etcd_outcome outcome));
static inline bool etcd_request_busy(const struct etcd_request *request)
{
	return request->easy;
}
/* POST to /v3/PATH; takes the body. Negative: not started. */
int etcd_request_start(struct etcd_request *request, const char *path, struct text *body);
void etcd_request_cancel(
	struct etcd_request *request); /* idempotent; not inside libcurl */
/* Ends all, notifies their owners by BROKEN, and closes all connections. */
void etcd_requests_break(struct etcd *e);
void etcd_requests_init(struct etcd *e);
void etcd_curl_fini(struct etcd *e);
/* Waits for requests in flight, at most so long. */
void etcd_curl_wait(struct etcd *e, const struct etcd_request *request, uint64_t most_ns);
void etcd_put_key(struct text *text, const char *name, const char *key);

/* ---- the link ---- */

enum { LINK_WAITS, LINK_LOOKS_UP, LINK_LOGS_IN, LINK_ASKS, LINK_UP };

#define ETCD_ADDRESSES_MAX 8u
#define ETCD_STORE_MAX 33u

struct etcd_link {
	struct sm sm;
	unsigned int endpoint, address;
	unsigned int addresses; /* of the endpoint */
	char numbers[ETCD_ADDRESSES_MAX][RESOLVE_NUMBER_MAX];
	struct resolve *resolve; /* LINK_LOOKS_UP only; or NULL */
	struct loop_wake wake;
	struct loop_timer timer;
	unsigned int failures; /* since it was up */
	struct etcd_request request;
	char token[ETCD_TOKEN_MAX];
	bool making;		    /* the store's number */
	bool made;		    /* it was, and is being read */
	char asked[ETCD_STORE_MAX]; /* the reply to that */
	uint64_t revision;	    /* of the reply */
};

int etcd_link_init(struct etcd *e);
void etcd_link_fini(struct etcd *e);
static inline bool etcd_link_up(const struct etcd_link *link)
{
	return sm_state(&link->sm) == LINK_UP;
}
/* No reply, or an invalid one: all requests end; the next endpoint is tried after a
 * pause. */
void etcd_link_broken(struct etcd *e, const struct err *why);

/* ---- the lease ---- */

struct etcd_lease {
	uint64_t id; /* 0: none */
	uint64_t ttl_ns;
	uint64_t granted_ns; /* loop time of that */
	uint64_t old;	     /* of an earlier process, or of this one: to be revoked */
	enum { LEASE_REVOKE, LEASE_GRANT, LEASE_KEEP } op;
	struct etcd_request request;
	struct loop_timer timer; /* next keep-alive, or next try */
	unsigned int failures;
};

void etcd_lease_init(struct etcd *e);
void etcd_lease_fini(struct etcd *e);
void etcd_lease_step(struct etcd *e);
void etcd_lease_lost(struct etcd *e, const char *why);

/* ---- own publications ---- */

/* Its state in etcd; table in etcd_own.c */
enum own_state {
	OWN_IDLE,     /* nothing */
	OWN_CLAIMING, /* the place is being claimed */
	OWN_HELD,     /* it is in etcd, under our lease */
	OWN_PUTTING,  /* a change is being put */
	OWN_DELETING,
	OWN_LOST, /* something may be in etcd, and not under our lease */
	OWN_STATES,
};

struct etcd_own {
	struct list link; /* in etcd.owns */
	struct list work; /* in etcd.due or .leaving, or unlinked */
	struct sm sm;	  /* enum own_state */
	struct etcd *etcd;
	struct publication *publication; /* NULL: withdrawn */
	char key[ETCD_SIDES][ETCD_NAME_MAX];
	char *text[ETCD_SIDES]; /* as desired; load NULL: none */
	uint8_t dirty;		/* OWN_DIRTY() of the texts to be put */
	uint8_t others;		/* times that another member had it */
	bool answered;		/* the publisher has its answer */
	bool logged;		/* that another member has it */
	uint64_t sent_lease;	/* under which the request puts or deletes */
	uint64_t end_ns; /* limit of the first claim's wait for the holder's lease */
	uint8_t failures;
	struct etcd_request request;
	struct loop_timer timer; /* runs: no attempt before it */
};

#define OWN_DIRTY(side) ((uint8_t)(1u << (side)))
#define OWN_DIRTY_ALL (OWN_DIRTY(ETCD_RECORDS) | OWN_DIRTY(ETCD_LOADS))

/* The lease is lost: so is everything put under it. */
void etcd_own_lost(struct etcd_own *own);
/* As directory_ops. */
int etcd_own_publish(struct directory *directory, struct publication *publication,
		     const struct place *place, const char *record, const char *load);
int etcd_own_update(struct publication *publication, const char *record,
		    const char *load);
void etcd_own_withdraw(struct publication *publication);
void etcd_own_step(struct etcd *e);
void etcd_owns_fini(struct etcd *e);

/* ---- groups ---- */

enum etcd_follow { FOLLOW_NOT, FOLLOW_WANTED, FOLLOW_RANGE, FOLLOW_STREAM };

struct etcd_half { /* records or loads of a group */
	enum etcd_side side;
	enum etcd_follow follow;
	bool again; /* to be read again, not before retry_ns */
	uint64_t retry_ns;
	uint64_t asked_ns; /* when its first page was requested */
	uint64_t next;	   /* revision at which the stream starts */
	uint64_t seen;	   /* the last one in the stream */
	int64_t watch_id;  /* in the stream; 0: not in it */
	bool confirmed;	   /* by etcd, in this stream */
	bool stands;	   /* it was, and this stream is not overdue */
	uint64_t revision; /* of the range, from its first page on */
	uint32_t mark;	   /* of entries that the range or the stream has had since */
	uint32_t born; /* the first mark of this subscription: older texts are unknown */
	uint64_t sweep_at_ns; /* then entries without it are removed; 0: they are */
	struct list *sweep;   /* entry at which the sweep continues; NULL: not started */
	unsigned int limit;   /* keys a page */
	unsigned int first;   /* of the first page */
	size_t from_len;      /* start of the next page */
	uint8_t from[ETCD_KEY_MAX + 4];
	struct etcd_request request;
};

struct etcd_entry {
	struct list link; /* in group.entries, by `number` */
	uint64_t number;
	struct etcd_spot {
		char worker[PLACE_WORKER_MAX];
		uint32_t rank[PLACE_AXES];
	} spot;
	char *text[ETCD_SIDES];
	uint32_t mark[ETCD_SIDES];
};

struct etcd_group {
	struct list link; /* in etcd.groups */
	struct etcd *etcd;
	char name[PLACE_GROUP_MAX];
	struct etcd_half half[ETCD_SIDES];
	struct strmap spots; /* struct etcd_spot -> entry */
	struct list entries, readers;
};

struct etcd_reader {
	struct list link; /* in group.readers; freed by the step only */
	struct etcd_group *group;
	struct watch *watch; /* NULL: ended */
	bool loads, synced;
	struct list *at; /* last reported entry, or the list; NULL: all were */
	uint64_t told;	 /* entries up to this number were */
};

/* As directory_ops. */
int etcd_group_watch(struct directory *directory, struct watch *watch, const char *name,
		     bool loads);
void etcd_group_unwatch(struct watch *watch);
void etcd_groups_fini(struct etcd *e);
/* A key of the range of that half, or of the stream (NULL). */
void etcd_group_take(struct etcd *e, const struct etcd_kv *kv, struct etcd_half *range);
void etcd_group_step(struct etcd *e);

/* ---- ranges and the stream ---- */

struct etcd_stream {
	struct etcd_request request;
	bool stale;		 /* it does not watch the desired groups */
	unsigned int awaited;	 /* watches that etcd has not confirmed */
	struct loop_timer check; /* are all confirmed? */
	uint64_t check_ns;	 /* after so long */
	uint64_t began_ns;
	int64_t watch_ids;
	struct loop_timer timer; /* batches changes of the desired groups */
};

void etcd_follow_init(struct etcd *e);
void etcd_follow_fini(struct etcd *e);
void etcd_follow_step(struct etcd *e);
void etcd_half_init(struct etcd *e, struct etcd_half *half);
/* All of it is read again; also inside libcurl. */
void etcd_half_again(struct etcd *e, struct etcd_half *half, uint64_t after_ns);
/* It has no readers. */
void etcd_half_stop(struct etcd *e, struct etcd_half *half);

/* ---- the whole ---- */

struct etcd_socket {
	struct loop_fd watch;
	struct etcd *etcd;
	bool used;
};

struct etcd {
	struct directory directory;
	struct loop *loop;
	const struct etcd_lib *lib;
	CURLM *multi; /* NULL: none now */
	bool in_curl, sick;
	struct loop_timer curl_timer;
	struct etcd_socket sockets[ETCD_SOCKETS_MAX];
	struct list requests;
	struct loop_defer step;
	struct loop_timer again;

	struct cluster_url url;
	char *ca, *cert, *key, *user, *password, *lease_file;
	uint64_t lease_s, patience_ns;

	struct etcd_link link;
	struct etcd_lease lease;
	char store[ETCD_STORE_MAX]; /* "": unknown */
	uint64_t revision;	    /* of the store, as last reported */
	uint64_t grace_ns;	    /* until then members of a reset store may return */

	struct list owns;
	struct strmap owns_by_key; /* of their records */
	/* struct etcd_own.work: published ones that are to be put; withdrawn ones, first
	 * those that are not in etcd */
	struct list due, leaving;
	unsigned int own_count, puts;
	unsigned int refused_puts; /* publications refused last */

	struct list groups;
	unsigned int group_count, ranges;
	uint64_t numbers; /* of entries */
	uint64_t entries, bytes;
	struct etcd_stream stream;

	struct directory_state state;
};

static inline struct etcd *etcd_of(const struct directory *directory)
{
	return container_of(directory, struct etcd, directory);
}

void etcd_kick(struct etcd *e);	      /* etcd_step() soon */
void etcd_kick_later(struct etcd *e); /* in ETCD_AGAIN_NS */
/* Recomputes the state; `why` NULL: unchanged. */
void etcd_state_check(struct etcd *e, const struct err *why);
/* etcd's refusal, as a kvd error code. */
void etcd_refusal(const struct etcd_message *answer, const char *what, struct err *err_p);
/* pause * [0.5, 1) */
uint64_t etcd_jitter(struct etcd *e, uint64_t pause_ns);
/* Twice as long with each failure, up to half a lease or 8 s; with jitter. */
uint64_t etcd_pause(struct etcd *e, unsigned int failures);

#endif
