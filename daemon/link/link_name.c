/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names are resolved on separate threads (resolve.h): the daemon's helpers have memory
 * to map, and a dead name server takes ten seconds a name. The number of running look-ups
 * is limited; beyond it a name is resolved later.
 */
#include "daemon/link/link_name.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/resolve.h"

#define ADDRESSES_MAX 16u
#define CONNECT_NS (2 * LOOP_NS_PER_S) /* including CURVE's handshake */
/* An address that has worked gets more time: the line may only be full, and a change
 * of address loses its queue. After this time the peer is dead anyway. */
#define LOST_NS (10 * LOOP_NS_PER_S)
#define PAUSE_MIN_NS (250 * LOOP_NS_PER_MS)
#define PAUSE_MAX_NS (8 * LOOP_NS_PER_S)

struct link_name {
	struct loop_wake wake;
	struct loop_timer timer;
	struct resolve *resolve; /* NULL: no look-up is running */
	void (*on_address)(void *owner, const char *address);
	void (*on_none)(void *owner, const char *host, const char *why);
	void *owner;
	uint64_t pause_ns;
	unsigned int count, next; /* of the addresses of the last answer */
	bool connected;
	bool complained;
	char host[LINK_ENDPOINT_MAX], port[8];
	char numbers[ADDRESSES_MAX][RESOLVE_NUMBER_MAX];
};

bool link_name_is_number(const char *host)
{
	struct in_addr addr;

	return *host == '[' || inet_pton(AF_INET, host, &addr) == 1;
}

static void link_name_ask(struct link_name *name)
{
	if (resolve_start(name->host, name->port, &name->wake, &name->resolve) == 0)
		return;
	err_clear();
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
	struct resolve *q = name->resolve;
	const char *why;

	if (!q || !resolve_done(q))
		return;
	name->resolve = NULL;
	if (name->connected) { /* connected meanwhile: the current address is right */
		resolve_drop(q);
		return;
	}
	name->next = 0;
	name->count = resolve_numbers(q, name->numbers, ADDRESSES_MAX, &why);
	resolve_drop(q);
	if (name->count) {
		name->pause_ns = PAUSE_MIN_NS;
		name->complained = false;
		try_next(name);
	} else {
		ask_later(name, why);
	}
}

static void link_name_on_timer(struct loop_timer *timer)
{
	struct link_name *name = container_of(timer, struct link_name, timer);

	if (name->connected || name->resolve)
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
	resolve_drop(name->resolve);
	loop_timer_stop(&name->timer);
	loop_wake_fini(&name->wake);
	mem_free(name);
}

void link_name_line(struct link_name *name, bool connected)
{
	bool stuck = !connected && !name->resolve && !loop_timer_running(&name->timer);

	if (connected)
		loop_timer_stop(&name->timer);
	else if (name->connected)
		loop_timer_start(&name->timer, LOST_NS);
	else if (stuck)
		loop_timer_start(&name->timer, name->pause_ns);
	name->connected = connected;
}
