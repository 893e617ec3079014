/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peerings: one attempt of two daemons to authenticate each other, and the addresses in
 * its HELLO and WELCOME.
 *
 * A peer has two: `cur`, while it is UP, and `next`, which is being set up, possibly
 * because the other daemon was restarted and its HELLO arrived before our pings failed.
 * Each has an epoch that this daemon generated, random and never reused, which the other
 * side writes into every frame together with its own; a frame finds its peering in the
 * table of epochs. So a frame of an ended attempt finds none, or one with another epoch
 * of its sender, and is dropped.
 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"

#define ADDRESSES_MAX 64u /* records in a HELLO that are read */

/* Epochs and nonces are our own random numbers. */
static struct list *bucket_of(struct list buckets[PEER_BUCKETS], uint64_t number)
{
	return &buckets[number % PEER_BUCKETS];
}

static void peering_index(struct peers *peers, struct peering *peering)
{
	list_push_back(bucket_of(peers->epochs, peering->epoch_in), &peering->link);
	list_push_back(bucket_of(peers->nonces, peering->nonce), &peering->by_nonce);
}

/* Random and unique among the live ones. */
static uint64_t mint_epoch(struct peers *peers)
{
	uint64_t epoch;

	do {
		epoch = loop_random_u64(peers->loop);
	} while (peering_find(peers, epoch));
	return epoch;
}

void peering_begin(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	struct peering *next = &impl->next;

	peering_end(next);
	*next = (struct peering){
		.owner = impl,
		.live = true,
		.begun_ns = loop_now_ns(peers->loop),
		.nonce = loop_random_u64(peers->loop),
		.epoch_in = mint_epoch(peers),
	};
	loop_random(peers->loop, next->token_in, sizeof(next->token_in));
	peering_index(peers, next);
	if (impl->unauthenticated)
		list_push_back(&peers->waiting, &impl->waits);
	impl->hellos = 0;
}

void peering_end(struct peering *peering)
{
	if (!peering->live)
		return;
	list_remove(&peering->link);
	list_remove(&peering->by_nonce);
	list_remove(peering == &peering->owner->cur ? &peering->owner->said.link
						    : &peering->owner->waits);
	peer_addresses_free(peering->addresses, &peering->address_count);
	peering->live = false;
	peering->heard = false;
}

void peering_promote(struct peer_impl *impl)
{
	struct peering *cur = &impl->cur, *next = &impl->next;

	assert(next->live && next->heard);
	peering_end(cur);
	/* Moved by value, so its links in the tables are set again; the addresses
	 * belong to `cur` from here on, and no longer to `next`. */
	list_remove(&next->link);
	list_remove(&next->by_nonce);
	*cur = *next;
	peering_index(impl->peers, cur);
	peer_name_put(&impl->said);
	next->address_count = 0;
	next->live = next->heard = false;
}

struct peering *peering_find(struct peers *peers, uint64_t epoch_in)
{
	struct list *bucket = bucket_of(peers->epochs, epoch_in);
	struct peering *peering;

	list_foreach(peering, bucket, link) { /* at most 128, about: a bucket */
		if (peering->epoch_in == epoch_in)
			return peering;
	}
	return NULL;
}

struct peering *peering_find_nonce(struct peers *peers, uint64_t nonce)
{
	struct list *bucket = bucket_of(peers->nonces, nonce);
	struct peering *peering;

	list_foreach(peering, bucket, by_nonce) { /* at most 128, about: a bucket */
		if (peering->nonce == nonce)
			return peering;
	}
	return NULL;
}

/* ---- addresses ---- */

int peer_addresses_encode(struct peers *peers, const struct peer_address *addresses,
			  unsigned int count)
{
	size_t size = sizeof(uint32_t);
	struct cursor c;

	if (count > TRANSPORTS_MAX)
		return err_raise(ERR_INVAL, "%u transports (limit %u)", count,
				 TRANSPORTS_MAX);
	for (unsigned int i = 0; i < count; i++) /* at most 8: TRANSPORTS_MAX */
		size += 2 + strlen(addresses[i].transport) + 4 + addresses[i].len;
	if (size > wire_body_cap(WIRE_T_HELLO) - sizeof(struct wire_hello))
		return err_raise(ERR_TOOBIG, "transport addresses: %zu bytes", size);
	peers->addresses = mem_zalloc(size);
	if (!peers->addresses)
		return err_pass(-ENOMEM);
	peers->addresses_len = size;
	cursor_write(&c, peers->addresses, size);
	cursor_put_u32(&c, count);
	for (unsigned int i = 0; i < count; i++) { /* at most 8: TRANSPORTS_MAX */
		cursor_put_str(&c, addresses[i].transport);
		cursor_put_blob(&c, addresses[i].data, addresses[i].len);
	}
	return cursor_check(&c, "transport addresses");
}

void peer_addresses_free(struct peer_address *addresses, unsigned int *count)
{
	for (unsigned int i = 0; i < *count; i++) /* at most 8: TRANSPORTS_MAX */
		mem_free(addresses[i].data);
	*count = 0;
}

/* Transports with longer names, and more than the limit, belong to newer versions. */
int peer_addresses_decode(const struct wire_blob *blob, struct peer_address *addresses,
			  unsigned int *count_p)
{
	struct cursor c;
	uint32_t count;
	int r = 0;

	cursor_read(&c, blob->data, blob->len);
	count = blob->len ? cursor_get_count(&c, ADDRESSES_MAX, 6) : 0;
	*count_p = 0;
	while (count-- && !c.bad && r == 0) { /* at most 64: ADDRESSES_MAX */
		struct peer_address *a = &addresses[*count_p];
		char name[WIRE_STR_MAX];
		const void *data;
		size_t len;

		cursor_get_str(&c, name, sizeof(name));
		data = cursor_get_blob(&c, blob->len, &len);
		if (c.bad || strlen(name) >= sizeof(a->transport) ||
		    *count_p == TRANSPORTS_MAX)
			continue;
		a->data = mem_dup(data, len);
		if (!a->data) {
			r = -ENOMEM;
			continue;
		}
		a->len = len;
		memcpy(a->transport, name, strlen(name) + 1);
		(*count_p)++;
	}
	if (r == 0)
		r = cursor_check(&c, "HELLO: field addresses");
	if (r < 0)
		peer_addresses_free(addresses, count_p);
	return err_pass(r);
}
