/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names are asked for on threads of their own (lookup.h): the daemon's helpers have
 * memory to map, and a dead name server takes ten seconds a name.
 *
 * A question cannot be called off. So a name that is freed leaves its own running:
 * the last of the two frees it. What runs is counted, also beyond the lives
 * of its names, and bounded; over the bound a name is asked for later.
 *
 * IPv4 goes first: a daemon that listens on one kind of address listens on that.
 */
#include "daemon/link/link_name.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"
#include "daemon/loop/lookup.h"
#include "daemon/loop/loop.h"

#define ASKED_MAX 64u /* threads */
#define ADDRESSES_MAX 16u
#define CONNECT_NS (2 * LOOP_NS_PER_S) /* CURVE's handshake included */
/* Once it was right an address gets more time: the line may only be full, and going
 * elsewhere loses what is in it. After this long the peer is dead anyway. */
#define LOST_NS (10 * LOOP_NS_PER_S)
#define PAUSE_MIN_NS (250 * LOOP_NS_PER_MS)
#define PAUSE_MAX_NS (8 * LOOP_NS_PER_S)

struct question {
	struct lookup lookup;
	pthread_mutex_t lock;	/* of the two below */
	struct loop_wake *wake; /* of the asker; NULL: it is gone */
	bool answered;
	atomic_int refs; /* the name's, and the thread's */
	char host[LINK_ENDPOINT_MAX], port[8];
};

struct link_name {
	struct loop_wake wake;
	struct loop_timer timer;
	struct question *question; /* NULL: none is under way */
	void (*on_address)(void *owner, const char *address);
	void (*on_none)(void *owner, const char *host, const char *why);
	void *owner;
	uint64_t pause_ns;
	uint32_t count, next; /* of the last answer's addresses */
	bool connected;
	bool complained;
	char host[LINK_ENDPOINT_MAX], port[8];
	char numbers[ADDRESSES_MAX][INET6_ADDRSTRLEN + 2];
};

static atomic_uint asked;

bool link_name_is_number(const char *host)
{
	struct in_addr addr;

	return *host == '[' || inet_pton(AF_INET, host, &addr) == 1;
}

/* ---- a question ---- */

static void question_unref(struct question *q)
{
	if (atomic_fetch_sub(&q->refs, 1) != 1)
		return;
	if (q->lookup.list)
		freeaddrinfo(q->lookup.list);
	pthread_mutex_destroy(&q->lock);
	mem_free(q);
	atomic_fetch_sub(&asked, 1);
}

/* Its thread. */
static void on_answer(struct lookup *lookup)
{
	struct question *q = container_of(lookup, struct question, lookup);

	pthread_mutex_lock(&q->lock);
	q->answered = true;
	if (q->wake)
		loop_wake(q->wake);
	pthread_mutex_unlock(&q->lock);
	question_unref(q);
}

static bool question_answered(struct question *q)
{
	bool answered;

	pthread_mutex_lock(&q->lock);
	answered = q->answered;
	pthread_mutex_unlock(&q->lock);
	return answered;
}

static void question_drop(struct question *q)
{
	pthread_mutex_lock(&q->lock);
	q->wake = NULL;
	pthread_mutex_unlock(&q->lock);
	question_unref(q);
}

/* NULL: not now. */
static struct question *question_ask(struct link_name *name)
{
	struct question *q = NULL;

	if (atomic_fetch_add(&asked, 1) < ASKED_MAX)
		q = mem_zalloc(sizeof(*q));
	if (!q) {
		atomic_fetch_sub(&asked, 1);
		err_clear();
		return NULL;
	}
	memcpy(q->host, name->host, sizeof(q->host));
	memcpy(q->port, name->port, sizeof(q->port));
	q->lookup = (struct lookup){.host = q->host, .port = q->port, .done = on_answer};
	q->wake = &name->wake;
	pthread_mutex_init(&q->lock, NULL);
	atomic_init(&q->refs, 2);
	if (lookup_start(&q->lookup) < 0) {
		err_clear();
		atomic_store(&q->refs, 1);
		question_unref(q);
		return NULL;
	}
	return q;
}

/* ---- its answer ---- */

static void number_add(struct link_name *name, const struct addrinfo *ai)
{
	char number[INET6_ADDRSTRLEN];

	if (name->count == ADDRESSES_MAX ||
	    getnameinfo(ai->ai_addr, ai->ai_addrlen, number, sizeof(number), NULL, 0,
			NI_NUMERICHOST) != 0 ||
	    strchr(number, '%')) /* of one link only: nothing that others can mean */
		return;
	snprintf(name->numbers[name->count++], sizeof(name->numbers[0]),
		 ai->ai_family == AF_INET6 ? "[%s]" : "%s", number);
}

static void take_family(struct link_name *name, const struct addrinfo *list, int family)
{
	for (const struct addrinfo *ai = list; ai; ai = ai->ai_next)
		if (ai->ai_family == family)
			number_add(name, ai);
}

static void link_name_ask(struct link_name *name)
{
	name->question = question_ask(name);
	if (!name->question)
		loop_timer_start(&name->timer, name->pause_ns);
}

static void ask_later(struct link_name *name, const char *why)
{
	if (!name->complained)
		log_warn("link", name->host, "name has no address", "why=\"%s\"", why);
	name->complained = true;
	loop_timer_start(&name->timer, name->pause_ns);
	name->pause_ns *= 2;
	if (name->pause_ns > PAUSE_MAX_NS)
		name->pause_ns = PAUSE_MAX_NS;
	name->on_none(name->owner, name->host, why);
}

static void try_next(struct link_name *name)
{
	char address[LINK_ENDPOINT_MAX];
	const char *number = name->numbers[name->next++];

	snprintf(address, sizeof(address), "tcp://%s:%s", number, name->port);
	loop_timer_start(&name->timer, CONNECT_NS);
	name->on_address(name->owner, address);
}

static void link_name_on_wake(struct loop_wake *wake)
{
	struct link_name *name = container_of(wake, struct link_name, wake);
	struct question *q = name->question;
	int status;

	if (!q || !question_answered(q))
		return;
	name->question = NULL;
	status = q->lookup.status;
	if (name->connected) { /* meanwhile: what it has is right */
		question_drop(q);
		return;
	}
	name->count = name->next = 0;
	if (status == 0) {
		take_family(name, q->lookup.list, AF_INET);
		take_family(name, q->lookup.list, AF_INET6);
	}
	question_drop(q);
	if (name->count) {
		name->pause_ns = PAUSE_MIN_NS;
		name->complained = false;
		try_next(name);
	} else {
		ask_later(name,
			  status ? gai_strerror(status) : "none that can be dialled");
	}
}

static void link_name_on_timer(struct loop_timer *timer)
{
	struct link_name *name = container_of(timer, struct link_name, timer);

	if (name->connected || name->question)
		return;
	if (name->next < name->count)
		try_next(name);
	else
		link_name_ask(name);
}

/* ---- for the link ---- */

int link_name_new(struct loop *loop, const char *host, const char *port,
		  void (*on_address)(void *owner, const char *address),
		  void (*on_none)(void *owner, const char *host, const char *why),
		  void *owner, struct link_name **name_p)
{
	struct link_name *name = mem_zalloc(sizeof(*name));
	int r;

	if (!name)
		return err_pass(-ENOMEM);
	r = loop_wake_init(&name->wake, loop, link_name_on_wake);
	if (r < 0) {
		mem_free(name);
		return err_pass(r);
	}
	loop_timer_init(&name->timer, loop, link_name_on_timer);
	snprintf(name->host, sizeof(name->host), "%s", host);
	snprintf(name->port, sizeof(name->port), "%s", port);
	name->on_address = on_address;
	name->on_none = on_none;
	name->owner = owner;
	name->pause_ns = PAUSE_MIN_NS;
	link_name_ask(name);
	*name_p = name;
	return 0;
}

void link_name_free(struct link_name *name)
{
	if (!name)
		return;
	if (name->question)
		question_drop(name->question);
	loop_timer_stop(&name->timer);
	loop_wake_fini(&name->wake);
	mem_free(name);
}

void link_name_line(struct link_name *name, bool connected)
{
	bool stuck = !connected && !name->question && !loop_timer_running(&name->timer);

	if (connected)
		loop_timer_stop(&name->timer);
	else if (name->connected)
		loop_timer_start(&name->timer, LOST_NS);
	else if (stuck)
		loop_timer_start(&name->timer, name->pause_ns);
	name->connected = connected;
}
