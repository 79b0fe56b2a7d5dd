// What a variant of `prepare` and `grad` is made for: value heads per q/k head, and whether q and k come raw.
#pragma once
#ifndef GROUP
#define GROUP 3
#endif
#ifndef L2NORM
#define L2NORM 0
#endif
