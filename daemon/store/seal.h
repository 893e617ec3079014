/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seal: the header of a part in a file, which makes it self-describing: the part's chunk,
 * its class (a digest), and a sum of all its bytes. Pure.
 */
#ifndef KVD_STORE_SEAL_H
#define KVD_STORE_SEAL_H

#include <stdbool.h>
#include <stdint.h>

#define SEAL_HEADER_BYTES 4096u
#define SEAL_DIGEST_BYTES 32u /* SHA-256 */
#define SEAL_ID_BYTES 32u

struct seal_facts {
	uint8_t class_digest[SEAL_DIGEST_BYTES];
	uint8_t id[SEAL_ID_BYTES];
	uint64_t first, part_bytes;
	uint64_t generation; /* of two copies of a part the later one counts */
	uint64_t part_sum;   /* of its bytes; set by seal_read() */
	uint32_t tokens;
};

/* The header of these bytes. */
void seal_make(uint8_t header[SEAL_HEADER_BYTES], const struct seal_facts *facts,
	       const void *part);
/* False: no header of kvd, or a torn one. */
bool seal_read(const uint8_t header[SEAL_HEADER_BYTES], struct seal_facts *facts_p);
/* Is it a whole header of another format? */
bool seal_is_other(const uint8_t header[SEAL_HEADER_BYTES], uint32_t *version_p);
/* Do part_bytes bytes match the sum? The facts are of seal_read(). */
bool seal_is_whole(const struct seal_facts *facts, const void *part);

#endif
