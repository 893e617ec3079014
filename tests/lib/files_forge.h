/* SPDX-License-Identifier: Apache-2.0 */
/* files_forge: descriptions of classes and slots of parts that no store has written. */
#ifndef KVD_TESTS_FILES_FORGE_H
#define KVD_TESTS_FILES_FORGE_H

#include "daemon/plan/layout.h"
#include "tests/lib/files_world.h"

#define SLAB (40 * KIB)
#define DESCRIPTION_MOST (MIB + 4 * KIB)

struct description {
	const char *tenant, *model, *revision, *scheme, *rope;
	uint32_t version, tokens;
	const struct layout *layout;
};
extern const struct description forge_right; /* without a layout */

/* As the class's own file says it, if all is as it should be. */
size_t forge_describe(const struct description *d, uint8_t *data);
void forge_digest(const uint8_t *data, size_t len, uint8_t digest[SEAL_DIGEST_BYTES]);
void forge_named(struct files_world *w, const char *name, uint8_t *data, size_t len);
/* Under the name that it must have. */
void forge_put(struct files_world *w, uint8_t *data, size_t len,
	       uint8_t digest[SEAL_DIGEST_BYTES]);
size_t forge_descriptions(struct files_world *w); /* that there are */

void forge_slab_file(struct files_world *w, uint32_t number, uint64_t slot,
		     uint64_t bytes);
/* Header and part, one behind the other. */
void forge_slot_at(struct files_world *w, uint32_t number, uint64_t slot, uint64_t index,
		   uint8_t *data);
uint8_t *forge_slot_new(void);
/* Of this kind, and right. */
struct seal_facts forge_facts(enum fw_kind kind, uint32_t id, const uint8_t *digest);
/* Part n of KIND_A's size and of this class, in a place of its own; in rising order. */
void forge_slot_of(struct files_world *w, uint32_t n, const uint8_t *digest,
		   uint64_t generation);

#endif
