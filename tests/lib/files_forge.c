/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/files_forge.h"

#include <stdlib.h>
#include <string.h>

#include <openssl/sha.h>

#include "daemon/base/cursor.h"
#include "daemon/store/files_class.h"

const struct description forge_right = {.tenant = "uid:1000",
					.model = "0",
					.revision = "1",
					.scheme = "sha256",
					.rope = "",
					.version = 1,
					.tokens = FW_TOKENS};

size_t forge_describe(const struct description *d, uint8_t *data)
{
	struct cursor out;

	cursor_write(&out, data, DESCRIPTION_MOST);
	cursor_put_u32(&out, d->version);
	cursor_put_str(&out, d->tenant);
	cursor_put_str(&out, d->model);
	cursor_put_str(&out, d->revision);
	cursor_put_str(&out, d->scheme);
	cursor_put_str(&out, d->rope);
	cursor_put_u32(&out, d->tokens);
	assert_int_equal(layout_encode(d->layout, &out), 0);
	assert_false(out.bad);
	return out.pos;
}

void forge_digest(const uint8_t *data, size_t len, uint8_t digest[SEAL_DIGEST_BYTES])
{
	assert_non_null(SHA256(data, len, digest));
}

void forge_named(struct files_world *w, const char *name, uint8_t *data, size_t len)
{
	struct disk_op op = {
		.what = DISK_NAMED_WRITE, .name = name, .iov = {{data, len}}};

	assert_int_equal(fw_raw(w, &op), 0);
}

void forge_put(struct files_world *w, uint8_t *data, size_t len,
	       uint8_t digest[SEAL_DIGEST_BYTES])
{
	char name[DISK_NAME_MAX + 1];

	forge_digest(data, len, digest);
	class_words_name(digest, name);
	forge_named(w, name, data, len);
}

void forge_slab_file(struct files_world *w, uint32_t number, uint64_t slot,
		     uint64_t bytes)
{
	struct disk_op op = {.what = DISK_MAKE,
			     .file = {.slot_bytes = slot, .number = number},
			     .bytes = bytes};

	assert_int_equal(fw_raw(w, &op), 0);
}

void forge_slot_at(struct files_world *w, uint32_t number, uint64_t slot, uint64_t index,
		   uint8_t *data)
{
	struct disk_op op = {.what = DISK_WRITE,
			     .file = {.slot_bytes = slot, .number = number},
			     .offset = index * slot,
			     .iov = {{data, slot}}};

	assert_int_equal(fw_raw(w, &op), 0);
}

uint8_t *forge_slot_new(void)
{
	uint8_t *data = aligned_alloc(DISK_ALIGN, SLAB);

	assert_non_null(data);
	memset(data, 0, SLAB);
	return data;
}

struct seal_facts forge_facts(enum fw_kind kind, uint32_t id, const uint8_t *digest)
{
	struct seal_facts facts = {.first = id,
				   .part_bytes = fw_part_bytes(kind),
				   .generation = 1,
				   .tokens = fw_tokens(id)};

	fw_id(id, facts.id);
	memcpy(facts.class_digest, digest, SEAL_DIGEST_BYTES);
	return facts;
}

size_t forge_descriptions(struct files_world *w)
{
	struct disk_list list = {0};
	struct disk_op op = {.what = DISK_LIST, .list = &list};
	size_t count;

	assert_int_equal(fw_raw(w, &op), 0);
	count = list.named_count;
	disk_list_fini(&list);
	return count;
}

void forge_slot_of(struct files_world *w, uint32_t n, const uint8_t *digest,
		   uint64_t generation)
{
	struct seal_facts facts = forge_facts(KIND_A, n, digest);
	uint8_t *data = forge_slot_new();

	facts.generation = generation;
	fw_fill(data + SEAL_HEADER_BYTES, KIND_A, n);
	seal_make(data, &facts, data + SEAL_HEADER_BYTES);
	if (n % 5 == 0)
		forge_slab_file(w, 40 + n / 5, 8 * KIB, SLAB);
	forge_slot_at(w, 40 + n / 5, 8 * KIB, n % 5, data);
	free(data);
}
