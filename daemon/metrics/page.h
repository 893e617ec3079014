/* SPDX-License-Identifier: Apache-2.0 */
/* page: page.html, as it lies in the program. */
#ifndef KVD_METRICS_PAGE_H
#define KVD_METRICS_PAGE_H

struct text;

/* The page's only script and style carry a number that nobody can know before: what
 * else might come into it is not run. `nonce`: with what its header must name. */
#define PAGE_NONCE_CHARS 32u
void page_make(struct text *out, char nonce[PAGE_NONCE_CHARS + 1]);

#endif
