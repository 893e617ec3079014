/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An entry names objects by number and finds them each time, because any of them may have
 * been removed between two entries. Three kinds of errors are distinguished. Values that
 * no correct engine sends (numbers that contradict its own slots, bytes outside the
 * arena) break the protocol. Errors possible in correct use (unregistered memory, a lost
 * peer, a limit) fail the slot, with a code in the slot and a text here for xfer.state.
 * Late entries (cancel or release of an ended object) are ignored.
 *
 * While a helper processes an entry, the ring stops, so order needs no further rules.
 * CANCEL and RELEASE apply to any object with a slot: each module checks whether the
 * object is its own.
 */
#include "daemon/request/ring_ops.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"

#define FAULTS_MAX 256u

struct ring_fault {
	struct list link;
	uint64_t id;
	struct err err;
};

/* ---- texts of refusals ---- */

static struct ring_fault *fault_find(const struct ring *ring, uint64_t id)
{
	struct ring_fault *fault;

	list_foreach(fault, &ring->faults, link) {
		if (fault->id == id)
			return fault;
	}
	return NULL;
}

const struct err *ring_fault_of(const struct ring *ring, uint64_t id)
{
	const struct ring_fault *fault = ring ? fault_find(ring, id) : NULL;

	return fault ? &fault->err : NULL;
}

static void fault_drop(struct ring *ring, struct ring_fault *fault)
{
	list_remove(&fault->link);
	ring->fault_count--;
	mem_free(fault);
}

void ring_faults_free(struct ring *ring)
{
	struct ring_fault *fault;

	list_foreach_safe(fault, &ring->faults, link)
		fault_drop(ring, fault);
}

/* The newest are kept; without memory for the text only the code remains. */
static void fault_put(struct ring *ring, uint64_t id, const struct err *err)
{
	struct ring_fault *fault = fault_find(ring, id);

	if (fault) /* of the slot's previous object */
		fault_drop(ring, fault);
	fault = mem_zalloc(sizeof(*fault));
	if (!fault) {
		err_clear();
		return;
	}
	fault->id = id;
	fault->err = *err;
	list_push_back(&ring->faults, &fault->link);
	if (++ring->fault_count > FAULTS_MAX)
		fault_drop(ring, list_first(&ring->faults, struct ring_fault, link));
}

void ring_refuse(struct ring *ring, uint32_t slot, uint64_t id)
{
	struct err why;

	err_take(&why);
	status_slot_set(ring->session->status, slot, KVD_FAILED, 0, why.code);
	fault_put(ring, id, &why);
}

void ring_forget(struct ring *ring, uint64_t id)
{
	struct ring_fault *fault = fault_find(ring, id);
	uint64_t slot = id - KVD_RING_IDS;

	if (fault)
		fault_drop(ring, fault);
	if (slot <= UINT32_MAX &&
	    status_slot_claimed(ring->session->status, (uint32_t)slot))
		status_slot_release(ring->session->status, (uint32_t)slot);
}

/* ---- payloads ---- */

int ring_payload_read(const struct ring_payload *payload, uint64_t offset, void *to,
		      size_t len)
{
	size_t got = 0;

	assert(offset <= payload->bytes && len <= payload->bytes - offset);
	if (payload->data) {
		memcpy(to, payload->data + offset, len);
		return 0;
	}
	/* not mmap(): its owner may truncate a memfd */
	while (got < len) {
		ssize_t n = pread(payload->fd, (char *)to + got, len - got,
				  (off_t)(offset + got));

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			return err_raise(ERR_RANGE, "fd: %llu bytes are missing",
					 (unsigned long long)(offset + len));
		if (n < 0)
			return err_raise_errno(errno, "reading the payload of an entry");
		got += (size_t)n;
	}
	return 0;
}

int ring_payload_copy(const struct ring_payload *payload, uint64_t offset, size_t len,
		      uint8_t **copy_p)
{
	cleanup_free uint8_t *copy = mem_alloc(len + 1);
	int r = copy ? ring_payload_read(payload, offset, copy, len) : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	copy[len] = 0;
	*copy_p = mem_steal(copy);
	return 0;
}

/* ---- objects of any module ---- */

bool ring_has(const struct ring *ring, uint64_t id)
{
	MODULES_EACH(ring->session->kvd, m)
	{
		if (m->ring_has && m->ring_has(ring->session, id))
			return true;
	}
	return false;
}

static int op_cancel(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	(void)arena;
	MODULES_EACH(ring->session->kvd, m)
	{
		if (m->ring_cancel && m->ring_cancel(ring->session, e->a))
			break;
	}
	return 0;
}

static int op_release(struct ring *ring, const struct kvd_ring_entry *e,
		      struct ring_payload *arena)
{
	struct ring_fault *fault;

	(void)arena;
	MODULES_EACH(ring->session->kvd, m)
	{
		if (!m->ring_release || !m->ring_release(ring->session, e->a))
			continue;
		fault = fault_find(ring, e->a); /* some modules have forgotten it */
		if (fault)
			fault_drop(ring, fault);
		return 0;
	}
	ring_forget(ring, e->a);
	return 0;
}

const struct ring_verb ring_verbs[] = {
	{KVD_RING_CANCEL, op_cancel},
	{KVD_RING_RELEASE, op_release},
	{0, NULL},
};

int ring_op(struct ring *ring, const struct kvd_ring_entry *e, struct ring_payload *arena)
{
	const struct ring_verb *verb = e->op < RING_OPS_MAX ? ring->verbs[e->op] : NULL;
	uint64_t bytes = kvd_ring_payload(e);

	assert(!ring->stopped);
	if (bytes > arena->bytes || e->offset > arena->bytes - bytes)
		return err_raise(ERR_PROTO,
				 "entry of op %u: its payload is outside the arena",
				 e->op);
	metrics_add(&ring->session->kvd->metrics, METRIC_RING_ENTRIES, 1);
	if (!verb)
		return err_raise(ERR_PROTO, "entry of an unknown op %u", e->op);
	return verb->run(ring, e, arena);
}
